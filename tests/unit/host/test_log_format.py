"""`--log-format json`: whoever prints a line and however, it comes out as one JSON object."""

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from tepal.host.log_format import log_format, parsed
from tepal.tools.cli.main import main
from tests.packages import ROOT

NOW = datetime(2026, 11, 20, 10, 15, 0, 123456, UTC)


@pytest.mark.parametrize(
    "line, level, source, message",
    [
        ("2026-11-22T04:49:49 INFO tepal server: The SuperLink runs.", "info", "tepal server", "The SuperLink runs."),
        ("\x1b[93mWARNING \x1b[0m:   Option `--insecure`: set.", "warning", "", "Option `--insecure`: set."),
        ("2026-11-22T04:49:49.269Z INFO [uvicorn.error] complete.", "info", "uvicorn.error", "complete."),
        ("INFO:     Waiting for startup.", "info", "", "Waiting for startup."),
        ("error: --port 3 is taken", "error", "", "--port 3 is taken"),
        ("  File \"app.py\", line 3, in train", "info", "", "  File \"app.py\", line 3, in train"),
        ("INFORMATION: none", "info", "", "INFORMATION: none"),
        ("2026/11/22 07:45:07 WARNING mlflow.store.db: late", "warning", "mlflow.store.db", "late"),
    ],
)  # fmt: skip
def test_every_form_of_a_log_line_is_known(line, level, source, message):
    told = parsed(line, NOW)
    assert told == {"time": "2026-11-20T10:15:00.123Z", "level": level, "source": source, "message": message}
    assert parsed("\x1b[0m  ", NOW) is None and parsed("\x1b[92mINFO \x1b[0m:      ", NOW) is None


def run(code):
    """Lines that a Python process prints to its standard output and error."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120, check=False)
    return done.stdout.decode().splitlines(), done.stderr.decode(), done.returncode


def test_all_that_a_process_and_its_children_print_is_json_and_nothing_is_lost():
    lines, errors, status = run(
        "import os, subprocess, sys\n"
        "from tepal.host.log_format import log_format\n"
        "print('before', flush=True)\n"
        "with log_format('json'):\n"
        "    print('INFO :      ün\"quoted\"')\n"
        "    print('WARNING: from stderr', file=sys.stderr)\n"
        "    subprocess.run(['sh', '-c', 'echo ERROR: of a child; echo plain >&2'])\n"
        "    for n in range(20000): print('ERROR: line', n)\n"
        "    sys.stdout.write('10 %\\r20 %\\rdone\\n')\n"
        "print('after')\n"
    )
    assert status == 0 and errors == ""
    assert lines[0] == "before" and lines[-1] == "after"
    told = [json.loads(line) for line in lines[1:-1]]
    assert [(each["level"], each["message"]) for each in told if each["level"] == "warning"] == [
        ("warning", "from stderr")
    ]
    messages = [each["message"] for each in told]
    assert {'ün"quoted"', "of a child", "plain", "done"} <= set(messages) and len(messages) == 20_000 + 5
    assert [message for message in messages if message.startswith("line ")] == [f"line {n}" for n in range(20_000)]


def test_a_process_that_stays_behind_does_not_keep_this_one():
    lines, _, status = run(
        "import subprocess, time\n"
        "from tepal.host.log_format import log_format\n"
        "begun = time.monotonic()\n"
        "with log_format('json'):\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print('last')\n"
        "child.kill()\n"
        "print(time.monotonic() - begun < 30)\n"
    )
    assert status == 0 and json.loads(lines[0])["message"] == "last" and lines[1] == "True"


def test_text_stays_as_it_is_and_another_format_is_refused(capfd):
    with log_format("text"):
        print("INFO : as it is")
    assert capfd.readouterr().out == "INFO : as it is\n"
    with pytest.raises(ValueError, match="expected text or json"), log_format("xml"):
        pass


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["node", "--site", "/nonexistent"], "/nonexistent"),
        (["node"], "no key is given"),
        (["node", "--insecure", "--memory-limit", "much"], "'much' is not a size"),
        (["server", "--credentials", "/nonexistent"], "/nonexistent"),
        (["server"], "no credentials are given"),
        (["server", "--insecure", "--metrics", "x"], "expected HOST:PORT or PORT"),
    ],
)
def test_why_a_command_does_not_start_is_json(arguments, words):
    lines, errors, status = run(
        "from tepal.tools.cli.main import main\n"
        f"main({[*arguments, '--log-format', 'json']})\n"
    )
    assert (status, errors) == (1, "")
    told = json.loads(lines[0])
    assert told["level"] == "error" and words in told["message"]
    assert all(json.loads(line)["level"] == "info" for line in lines[1:]), "further lines of one message"


@pytest.mark.parametrize("command", [["server"], ["node"]])
def test_both_commands_refuse_another_format(command):
    done = CliRunner().invoke(main, [*command, "--insecure", "--log-format", "xml"])
    assert done.exit_code == 1 and "expected text or json" in done.output
