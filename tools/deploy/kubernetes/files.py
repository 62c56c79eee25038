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

    `separate`: Secrets go to a folder secrets/, which git ignores, and the other files have none.
    """
    if output.exists() and not output.is_dir():
        raise ProvisionError(f"--output {output} is a file, expected a folder")
    written = []
    for name, (secrets, others) in parts.items():
        if separate and secrets:
            written.append(_write(output / _SECRETS / name, secrets, secret=True))
            (output / _SECRETS).chmod(0o700)
            (output / _SECRETS / ".gitignore").write_text("*\n")
            secrets = ()
        written.append(_write(output / name, [*secrets, *others], secret=bool(secrets)))
    return written


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
