"""The files for launchers of Ray in conf/cluster: what can be checked of them without a cluster."""

import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from tepal.tools.cli.main import main
from tests.packages import ROOT

FOLDER = ROOT / "conf/cluster"
SBATCH, CLUSTER, RAYJOB = (FOLDER / name for name in ("slurm.sbatch", "cluster.yaml", "rayjob.yaml"))


def tepal_options(text):
    """The parameters of the `tepal compare` in a text, as click reads them."""
    words = shlex.split(re.search(r"tepal (compare .*?)(?:'?$)", text, flags=re.MULTILINE)[1])
    compare = get_command(main).get_command(None, words[0])
    return compare.make_context(words[0], words[1:]).params


@pytest.mark.parametrize("path", [SBATCH, RAYJOB], ids=lambda path: path.name)
def test_the_commands_have_options_that_there_are(path):
    without_comments = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
    assert tepal_options(without_comments)["ray"] == "auto"


# --- Slurm ----------------------------------------------------------------------------------------------------------

SLURM = """\
srun() {
    while [[ $1 == --* ]]; do shift; done
    if [[ $1 == hostname ]]; then echo "10.1.2.3 192.168.0.1 "; else printf '%s\\n' "$@"; fi
}
scontrol() { [[ "$*" == "show hostnames n[1-4]" ]] && printf 'n%s\\n' 1 2 3 4; }
source() { :; }
"""
"""Slurm's commands as functions: srun prints the words of what it would start."""


def test_the_batch_file_starts_ray_on_all_nodes_with_the_first_as_the_head():
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    of_slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_CPUS_PER_TASK": "16"}
    done = subprocess.run(
        ["bash", "-c", SLURM + SBATCH.read_text()], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **of_slurm},
    )  # fmt: skip
    words = done.stdout.split("\n")
    ours = words.index("--")
    assert words[:ours] == [
        "ray", "symmetric-run", "--address", "10.1.2.3:6379", "--min-nodes", "4", "--num-cpus", "16",
    ]  # fmt: skip
    assert words[ours + 1 : ours + 3] == ["tepal", "compare"]


def test_the_batch_file_asks_for_one_process_on_each_of_several_nodes():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SBATCH.read_text(), flags=re.MULTILINE))
    assert int(asked["nodes"]) > 1 and asked["ntasks-per-node"] == "1" and int(asked["cpus-per-task"]) >= 1


# --- Ray's launcher -------------------------------------------------------------------------------------------------


def rays_schema():
    found = find_spec("ray")
    if found is None:
        pytest.skip("needs Ray's schema")
    return json.loads((Path(found.origin).parent / "autoscaler/ray-schema.json").read_text())


def test_the_file_of_rays_launcher_is_valid_by_its_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema, config = rays_schema(), yaml.safe_load(CLUSTER.read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        jsonschema.validate({**config, "setup_comands": []}, schema)


def test_the_launcher_starts_all_machines_that_its_file_names():
    """Ray takes their number for min_workers and max_workers where these are left out."""
    config = yaml.safe_load(CLUSTER.read_text())
    machines = [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    assert len(set(machines)) == len(machines) > 1
    assert not {"min_workers", "max_workers"} & config.keys()
    assert {(ROOT / path).name for path in config["file_mounts"].values()} == {"dist", "constraints.txt"}


# --- KubeRay --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claim_and_job():
    return tuple(yaml.safe_load_all(RAYJOB.read_text()))


def groups(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_the_pods_of_the_job_are_valid_by_the_published_schemas(claim_and_job, version):
    import kubernetes_validate

    claim, job = claim_and_job
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]} for group in groups(job)
    ]
    for one in (claim, *pods):
        assert kubernetes_validate.validate(one, version, strict=True) == version


def test_the_job_has_a_fixed_number_of_machines_and_its_results_on_the_claim(claim_and_job):
    claim, job = claim_and_job
    head, *workers = groups(job)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    for group in workers:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] > 0
    (volume,) = head["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = head["template"]["spec"]["containers"][0]["volumeMounts"]
    assert mount["name"] == volume["name"] and f"cd {mount['mountPath']} " in job["spec"]["entrypoint"]


def test_the_job_has_the_ray_that_is_installed_with_tepal(claim_and_job):
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert claim_and_job[1]["spec"]["rayClusterSpec"]["rayVersion"] == pinned
    assert f"rayproject/ray:{pinned}-" in RAYJOB.read_text() and f"ray[default]=={pinned}" in RAYJOB.read_text()
