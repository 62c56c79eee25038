"""Manifests as YAML files: those with a Secret are for their owner alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tepal.host.files import replacing
from tepal.host.site import ProvisionError
from tepal.host.superlink import RunError, in_bundle, is_app
from tepal.tools.deploy.kubernetes.pod import Manifest

_SECRETS = "secrets"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class Written:
    """A file that was written, and whether it has a Secret."""

    path: Path
    secret: bool


class _Dumper(yaml.SafeDumper):
    """Quotes each text that some reader of YAML could take for something else: kubectl's takes 1e5, 0o14 and y."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """Return objects as documents of one YAML file."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=False, width=10**6
    )


def write(
    output: Path, parts: Mapping[str, tuple[Sequence[Manifest], Sequence[Manifest]]], *, separate: bool = False
) -> list[Written]:
    """Write (Secrets, other objects) to files by name, below `output`; files of an earlier call are replaced.

    `separate`: Secrets go to a folder secrets/, and the other files have none. Git ignores each folder with a Secret.
    Raises ProvisionError, and nothing is written then, if a Secret would be in the bundle of a Flower app.
    """
    if output.exists() and not output.is_dir():
        raise ProvisionError(f"--output {output} is a file, expected a folder")
    with_secrets = output / _SECRETS if separate else output
    _check_bundles(output, [with_secrets / name for name, (secrets, _) in parts.items() if secrets])
    written = []
    for name, (secrets, others) in parts.items():
        if separate and secrets:
            written.append(_write(with_secrets / name, secrets, secret=True))
            with_secrets.chmod(0o700)
            _hide(with_secrets)
            secrets = ()
        written.append(_write(output / name, [*secrets, *others], secret=bool(secrets)))
        if secrets:
            _hide((output / name).parent)
    return written


def _check_bundles(output: Path, files: Sequence[Path]) -> None:
    """Raise ProvisionError if one of these files, with Secrets, would be in the bundle of an app around `output`."""
    here = output.resolve()
    for app in filter(_is_readable_app, (here, *here.parents)) if files else ():
        for path in files:
            if in_bundle(app, here.relative_to(app) / path.relative_to(output)):
                raise ProvisionError(
                    f"{path} would have a Secret and be in the bundle of the Flower app {app}, which every site "
                    f"receives: name a folder elsewhere with --output, or add this one to {app / '.gitignore'}"
                )


def _is_readable_app(folder: Path) -> bool:
    """Whether a folder is a Flower app's. Of a folder above, pyproject.toml may be anything: then it is none."""
    try:
        return is_app(folder)
    except (RunError, OSError, ValueError, TypeError, AttributeError):
        return False


def _hide(folder: Path) -> None:
    """Let git ignore all of a folder, except that of a repository or one that has rules of its own."""
    if not (folder / ".gitignore").exists() and not (folder / ".git").exists():
        (folder / ".gitignore").write_text("*\n")


def _write(path: Path, manifests: Sequence[Manifest], *, secret: bool) -> Written:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if secret else 0o666  # of which the umask takes some away
    with replacing(path) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if secret:
                os.fchmod(descriptor, 0o600)  # the umask may have removed more rights
            file.write(to_yaml(manifests))
    return Written(path, secret)
