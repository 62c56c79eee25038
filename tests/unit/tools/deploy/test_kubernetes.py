"""The manifests for Kubernetes: valid, consistent with themselves, the images and the compose files, and secret."""

import base64
import io
import json
import os
import re
import shutil
import stat
import string
import zipfile
from pathlib import Path

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from tepal.client_app.node import node as running_node
from tepal.client_app.node.settings import NodeSettings
from tepal.host.site import NAME
from tepal.host.superlink import stage_app
from tepal.host.toml import parse_run_config
from tepal.tools.cli.main import main
from tepal.tools.cli.node import app as node_app
from tepal.tools.cli.provision import app as provision
from tepal.tools.deploy.kubernetes.files import to_yaml
from tepal.tools.deploy.kubernetes.pod import as_pairs, label_of
from tepal.tools.deploy.provision import Provisioned, add, make, read_site, renew_server, renew_site, revoke
from tepal.tools.init import write_app
from tests.packages import ROOT

SITES = ("north", "South_1.", "y")
DATA = ("--data-claim", "examples")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
VARIANTS = {
    "default": DATA,
    "host path": ("--data-host-path", "/srv/data", "--node-selector", "kubernetes.io/hostname=gpu-1"),
    "no data": ("--no-data", "--node-config", "partition-id=0 num-partitions=3"),
    "all": (
        *DATA, "--namespace", "fleet", "--create-namespace", "--registry", "registry.example.org:5000/team", "--tag",
        "1.2.3", "--pull-secret", "pull", "--storage-class", "fast", "--service", "ClusterIP", "--server-storage",
        "100Gi", "--server-memory", "8Gi", "--server-cpus", "500m", "--site-storage", "1Ti", "--site-memory", "16Gi",
        "--site-cpus", "2.5", "--gpus", "2", "--runtime-class", "nvidia", "--node-selector", "gpu=yes", "--run-config",
        'strategy="fedfrozen" num-server-rounds=2', "--node-config", 'device="cuda"', "--separate-secrets",
    ),
}  # fmt: skip


def tepal(*arguments):
    """Run `tepal provision …`; return (exit status, standard output, standard error)."""
    result = CliRunner().invoke(provision, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def rendered(folder, output, *arguments):
    """Write manifests; return those of each file, as another program reads them."""
    status, _, said = tepal("kubernetes", folder, "--output", output, *arguments)
    assert status == 0, said
    return {
        str(path.relative_to(output)): list(yaml.safe_load_all(path.read_text())) for path in output.rglob("*.yaml")
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Provisioned:
    return make(tmp_path_factory.mktemp("made") / "fl", hosts=["fl.example.org"], sites=SITES, port=9443)


@pytest.fixture
def own(made, tmp_path) -> Provisioned:
    """A deployment that a test may change."""
    return Provisioned(Path(shutil.copytree(made.folder, tmp_path / "own")))


@pytest.fixture(scope="module", params=VARIANTS)
def files(request, made, tmp_path_factory):
    return rendered(made.folder, tmp_path_factory.mktemp("k8s") / "out", *VARIANTS[request.param])


def deployments(files):
    """(a Deployment, all objects of its cluster) for each of them: a site is in another cluster than the server."""
    for name in ("server.yaml", *(f"sites/{site}.yaml" for site in SITES)):
        objects = [*files[name], *files.get(f"secrets/{name}", [])]
        (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
        yield deployment, objects


def pods(files):
    for deployment, objects in deployments(files):
        spec = deployment["spec"]["template"]["spec"]
        yield spec, [*spec.get("initContainers", []), *spec["containers"]], objects


def named(objects, kind, name):
    """The one object of this kind and name."""
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


# What Kubernetes takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.27", "1.30", "1.33", "1.37"])
def test_every_object_is_valid_by_the_published_schemas(files, version):
    import kubernetes_validate

    objects = [one for each in files.values() for one in each]
    assert {one["kind"] for one in objects} >= {
        "ConfigMap", "Deployment", "PersistentVolumeClaim", "Secret", "Service",
    }  # fmt: skip
    for one in objects:
        assert kubernetes_validate.validate(one, version, strict=True) == version


def test_the_schemas_refuse_a_misspelt_field(files):
    import kubernetes_validate

    (deployment, _), *_ = deployments(files)
    changed = json.loads(json.dumps(deployment))
    changed["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(changed, "1.30", strict=True)


def test_every_secret_settings_and_claim_that_a_pod_names_is_there_with_its_keys(files):
    for spec, containers, objects in pods(files):
        keys = {}
        for volume in spec["volumes"]:
            if "secret" in volume:
                keys[volume["name"]] = named(objects, "Secret", volume["secret"]["secretName"])["data"].keys()
            elif "configMap" in volume:
                named(objects, "ConfigMap", volume["configMap"]["name"])
            elif (claim := volume.get("persistentVolumeClaim")) and claim["claimName"] != "examples":
                named(objects, "PersistentVolumeClaim", claim["claimName"])
        for container in containers:
            for source in container.get("envFrom", []):
                named(objects, "ConfigMap", source["configMapRef"]["name"])
            for mount in container["volumeMounts"]:
                if "subPath" in mount:
                    assert mount["subPath"] in keys[mount["name"]]
            for word in container.get("command", []):
                if word.startswith("/run/credentials/"):
                    assert word.removeprefix("/run/credentials/") in keys["credentials"]


def test_every_mount_has_a_volume_and_every_volume_a_mount(files):
    for spec, containers, _ in pods(files):
        volumes = [volume["name"] for volume in spec["volumes"]]
        mounts = [mount for container in containers for mount in container["volumeMounts"]]
        assert len(set(volumes)) == len(volumes) and {mount["name"] for mount in mounts} == set(volumes)
        for container in containers:
            places = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(places)) == len(places)


def test_selectors_match_the_pods_and_no_others(files):
    labels = [deployment["spec"]["template"]["metadata"]["labels"] for deployment, _ in deployments(files)]
    for (deployment, _), own in zip(deployments(files), labels, strict=True):
        wanted = deployment["spec"]["selector"]["matchLabels"]
        assert [each for each in labels if wanted.items() <= each.items()] == [own]
    (service,) = [one for one in files["server.yaml"] if one["kind"] == "Service"]
    assert [each for each in labels if service["spec"]["selector"].items() <= each.items()] == labels[:1]
    (port,) = service["spec"]["ports"]
    (container,) = next(iter(pods(files)))[0]["containers"]
    assert port["targetPort"] == container["ports"][0]["name"] and port["port"] == 9443


def test_objects_of_one_kind_have_different_names_and_one_namespace(files):
    objects = [one for each in files.values() for one in each if one["kind"] != "Namespace"]
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    assert len({one["metadata"].get("namespace") for one in objects}) == 1
    for _, name in names:
        assert DNS_LABEL.fullmatch(name) and len(name) <= 63


def test_pods_are_of_the_restricted_profile_and_replaced_before_a_new_one_starts(files):
    """The profile "restricted" of Kubernetes' Pod Security Standards, except for the folder of a host."""
    for spec, containers, _ in pods(files):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 49999
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "hostPath"}
        for volume in spec["volumes"]:
            (kind,) = volume.keys() - {"name"}
            assert kind in allowed and (kind != "hostPath" or volume["name"] == "data")
        for container in containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
            assert container["resources"]["limits"] == container["resources"]["requests"]
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    for deployment, _ in deployments(files):
        assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_a_namespace_enforces_that_profile_unless_a_host_folder_is_mounted(made, tmp_path):
    more = ("--namespace", "fleet", "--create-namespace")
    for place, enforced in ((DATA, "restricted"), (("--data-host-path", "/srv/data"), None)):
        ((space,),) = [
            each for name, each in rendered(made.folder, tmp_path, *place, *more).items() if name == "namespace.yaml"
        ]
        assert space["kind"] == "Namespace" and space["metadata"]["name"] == "fleet"
        assert space["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") == enforced


# Agreement with the images and the compose files ----------------------------------------------------------------------


def image(part):
    """(environment, command, exposed ports) of a Dockerfile's last stage."""
    text = (ROOT / f"docker/{part}.Dockerfile").read_text().replace("\\\n", " ")
    environment = {}
    for line in re.findall(r"^ENV (.*)$", text, flags=re.MULTILINE):
        environment |= dict(pair.split("=", 1) for pair in line.split())
    commands = re.findall(r"^CMD (\[.*\])$", text, flags=re.MULTILINE)
    health = re.findall(r"^\s*HEALTHCHECK.*?CMD (\[.*\])$", text, flags=re.MULTILINE)
    return environment, json.loads(commands[-1]), json.loads(health[-1]), re.findall(r"^EXPOSE (\d+)", text, re.M)


COMPOSE = yaml.safe_load((ROOT / "docker/common.yml").read_text())["services"]


def default(text):
    """The default of a setting of a compose file, ${NAME:-default}."""
    return re.sub(r"\$\{[A-Z_]+:?-([^}]*)\}", r"\1", str(text))


def test_ports_folders_limits_and_settings_are_those_of_the_images_and_compose_files(made, tmp_path):
    files = rendered(made.folder, tmp_path / "k8s", *DATA)
    (server, of_server, _), (site, of_site, _), *_ = pods(files)
    environment, _, health, exposed = image("server")
    (container,) = of_server
    assert [str(port["containerPort"]) for port in container["ports"]] == exposed == ["9092"]
    assert (
        environment["TEPAL_FLEET_API_ADDRESS"].endswith(":9092")
        and default(COMPOSE["server"]["ports"][0]) == "9092:9092"
    )
    assert container["readinessProbe"]["exec"]["command"] == health
    assert container["livenessProbe"]["exec"]["command"] == [*health, "--alive"]
    places = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    credentials = environment["TEPAL_CREDENTIALS"]
    assert set(places) == {environment["TEPAL_STATE"], "/tmp"} | {
        f"{credentials}/{name}" for name in ("ca.crt", "server.crt", "server.key", "nodes", "revoked")
    }
    assert [place for place, mount in places.items() if not mount.get("readOnly")] == ["/app/state", "/tmp"]

    environment, _, health, _ = image("client")
    (_, node) = of_site
    places = {mount["mountPath"]: mount.get("readOnly", False) for mount in node["volumeMounts"]}
    # As in compose.client.yml, and its tmpfs.
    client = yaml.safe_load((ROOT / "docker/compose.client.yml").read_text())["services"]["client"]["volumes"]
    targets = {one.split(":")[1]: False for one in client if isinstance(one, str)}
    targets |= {one["target"]: one["read_only"] for one in client if not isinstance(one, str)}
    assert places == {**targets, "/tmp": False}
    assert {environment[key] for key in ("TEPAL_SITE", "TEPAL_NODE_STATE", "TEPAL_CACHE")} < set(places)
    assert node["livenessProbe"]["exec"]["command"] == [*health, "--alive"]

    for name, (_, containers, objects), part in (
        ("server", (server, of_server, files["server.yaml"]), "server"),
        ("node", (site, of_site, files["sites/north.yaml"]), "client"),
    ):
        (container,) = [one for one in containers if one["name"] == name]
        limits = container["resources"]["limits"]
        assert limits["memory"] == default(COMPOSE[part]["mem_limit"]).upper() + "i"
        assert float(limits["cpu"]) == float(default(COMPOSE[part]["cpus"]))
        settings_ = named(objects, "ConfigMap", container["envFrom"][0]["configMapRef"]["name"])["data"]
        composed = {key: default(value) for key, value in COMPOSE[part]["environment"].items()}
        composed = {key: value for key, value in composed.items() if value}  # an empty one is as one that is not set
        if data := composed.pop("TEPAL_NODE_DATA", ""):  # the manifests set a data-path instead
            composed["TEPAL_NODE_CONFIG"] = f'data-path="{data}"'
        assert composed.items() <= settings_.items()
    for spec, _, _ in pods(files):
        assert f"{spec['terminationGracePeriodSeconds']}s" == COMPOSE["server"]["stop_grace_period"]


def test_the_time_to_stop_is_more_than_a_node_takes():
    after = running_node._LAST_ANSWER + running_node._COLLECTING + running_node._SIGNING_OFF
    assert NodeSettings(superlink="").grace + after < int(COMPOSE["client"]["stop_grace_period"].rstrip("s"))


def test_commands_are_accepted_by_the_command_line(files):
    seen = set()
    for _, containers, _ in pods(files):
        for container in containers:
            for probe in ("livenessProbe", "readinessProbe"):
                words = container.get(probe, {}).get("exec", {}).get("command")
                if words:
                    program, *words = words
                    group = get_command(main)
                    while hasattr(group, "commands"):
                        group = group.commands[words.pop(0)]
                    group.make_context(program, list(words))
                    seen.add(probe)
            if container["name"] in ("server", "node"):
                assert "command" not in container and "args" not in container, "the image's command is run"
            else:
                assert container["command"][0] == "install"
    assert seen == {"livenessProbe", "readinessProbe"}


def test_settings_of_a_node_are_read_by_the_node(made, tmp_path, monkeypatch):
    """The environment of the pod, with the image's, in the real command; its folder is the Secret's content."""
    given_ = []
    monkeypatch.setattr(running_node, "run_node", given_.append)
    files = rendered(made.folder, tmp_path / "k8s", *DATA, "--node-config", 'batch-size=8 device="cuda:1"')
    objects = files["sites/South_1..yaml"]
    (secret,) = [one for one in objects if one["kind"] == "Secret"]
    folder = tmp_path / "site"
    folder.mkdir()
    for name, content in secret["data"].items():
        (folder / name).write_bytes(base64.b64decode(content))
        (folder / name).chmod(0o600)
    (data,) = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    environment = {**image("client")[0], **data, "TEPAL_SITE": str(folder)}
    done = CliRunner().invoke(node_app, [], env=environment)
    assert done.exit_code == 0, done.output
    (found,) = given_
    assert (found.name, found.superlink, found.health) == ("South_1.", "fl.example.org:9443", "0.0.0.0:9096")
    assert found.node_config == {
        "name": "South_1.", "data-path": "/data/site.npz", "batch-size": 8, "device": "cuda:1",
    }  # fmt: skip
    (_, node) = list(pods(files))[2][1]
    assert node["readinessProbe"]["grpc"]["port"] == node["ports"][0]["containerPort"] == 9096


def test_a_servers_settings_are_options_of_the_server(files):
    group = get_command(main).commands["server"]
    options = {option.envvar for option in group.params if option.envvar} | {"TEPAL_RUN_CONFIG"}
    (data,) = [one["data"] for one in files["server.yaml"] if one["metadata"]["name"] == "tepal-server-settings"]
    assert data.keys() <= options
    if "TEPAL_RUN_CONFIG" in data:
        (line,) = data["TEPAL_RUN_CONFIG"].splitlines()
        assert parse_run_config([line]) == {"strategy": "fedfrozen", "num-server-rounds": 2}


def test_the_options_are_in_the_manifests(made, tmp_path):
    files = rendered(made.folder, tmp_path / "k8s", *VARIANTS["all"])
    (server, (container,), objects), *sites = pods(files)
    assert container["image"] == "registry.example.org:5000/team/tepal-server:1.2.3"
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "8Gi"}
    claim = named(objects, "PersistentVolumeClaim", "tepal-server-state")["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]) == ("fast", {"storage": "100Gi"})
    for spec, containers, _ in [*sites, (server, [container], objects)]:
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert all(one["image"].startswith("registry.example.org:5000/team/tepal-") for one in containers)
    for spec, (copy, node), _ in sites:
        assert node["image"] == copy["image"] == "registry.example.org:5000/team/tepal-client-cuda:1.2.3"
        assert node["resources"]["limits"] == {"cpu": "2.5", "memory": "16Gi", "nvidia.com/gpu": "2"}
        assert "nvidia.com/gpu" not in copy["resources"]["limits"]
        assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("nvidia", {"gpu": "yes"})
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (DATA, {"persistentVolumeClaim": {"claimName": "examples", "readOnly": True}}),
        (("--data-host-path", "/srv/data"), {"hostPath": {"path": "/srv/data", "type": "Directory"}}),
        (("--no-data",), None),
    ],
)
def test_a_sites_examples_are_mounted_read_only(made, tmp_path, arguments, wanted):
    files = rendered(made.folder, tmp_path / "k8s", *arguments, "--site", "north")
    (deployment,) = [one for one in files["sites/north.yaml"] if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    found = [
        {key: value for key, value in one.items() if key != "name"} for one in spec["volumes"] if one["name"] == "data"
    ]
    assert found == ([wanted] if wanted else [])
    mounts = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "data"]
    assert mounts == ([{"name": "data", "mountPath": "/data", "readOnly": True}] if wanted else [])
    (config,) = [one["data"]["TEPAL_NODE_CONFIG"] for one in files["sites/north.yaml"] if one["kind"] == "ConfigMap"]
    assert config == ('data-path="/data/site.npz"' if wanted else "")


def test_a_sites_own_data_path_stays(tmp_path):
    made = make(
        tmp_path / "fl",
        hosts=["fl.example.org"],
        sites=["north"],
        node_config={"data-path": "/data/scans"},
        unpacked=True,
    )
    for more, expected in (((), ""), (("--node-config", "data-path='/data/other'"), 'data-path="/data/other"')):
        files = rendered(made.folder, tmp_path / "k8s", *DATA, *more)
        (config,) = [one["data"] for one in files["sites/north.yaml"] if one["kind"] == "ConfigMap"]
        assert config["TEPAL_NODE_CONFIG"] == expected


@pytest.mark.parametrize(
    ("of_site", "more", "expected"),
    [
        ({"partition-id": 3}, (), ""),
        ({}, ("--node-config", "partition-id=3 num-partitions=9"), "partition-id=3 num-partitions=9"),
    ],
)
def test_a_site_that_takes_its_part_of_a_data_set_has_no_data_path(tmp_path, of_site, more, expected):
    made = make(tmp_path / "fl", hosts=["fl.example.org"], sites=["north"], node_config=of_site, unpacked=True)
    files = rendered(made.folder, tmp_path / "k8s", *DATA, *more)
    (config,) = [one["data"] for one in files["sites/north.yaml"] if one["kind"] == "ConfigMap"]
    assert config["TEPAL_NODE_CONFIG"] == expected


# Secrets --------------------------------------------------------------------------------------------------------------


def private_lines(made, tmp_path):
    """All lines of private keys, as they are and in base64 at each of the three offsets."""
    keys = [made.server.key.read_bytes(), (made.folder / "ca/ca.key").read_bytes()]
    for name in SITES:
        shutil.unpack_archive(made.archive(name), tmp_path)
        keys.append((tmp_path / name / "node.key").read_bytes())
    lines = [line for key in keys for line in key.splitlines() if len(line) > 30 and b"-----" not in line]
    lines = [line for line in lines if not line.startswith(b"b3BlbnNzaC1rZXktdjE")]  # what each OpenSSH key begins with
    encoded = [base64.b64encode(line[offset:])[:-4] for line in lines for offset in range(3)]
    assert len(lines) >= 12
    return [text.decode() for text in (*lines, *encoded)]


def test_no_secret_is_printed_or_in_a_manifest_without_secrets(made, tmp_path):
    secrets = private_lines(made, tmp_path)
    output = tmp_path / "k8s"
    status, out, err = tepal("kubernetes", made.folder, "--output", output, *DATA, "--separate-secrets")
    assert status == 0
    apart = sorted(str(path.relative_to(output)) for path in output.rglob("*.yaml") if "secrets" in path.parts)
    assert apart == ["secrets/server.yaml", *sorted(f"secrets/sites/{name}.yaml" for name in SITES)]
    for path in output.rglob("*.yaml"):
        text = path.read_text()
        if "secrets" in path.parts:
            assert {one["kind"] for one in yaml.safe_load_all(text)} == {"Secret"}
            assert any(secret in text for secret in secrets)
        else:
            assert "Secret" not in {one["kind"] for one in yaml.safe_load_all(text)}
            assert not any(secret in text for secret in secrets)
    assert not any(secret in out + err for secret in secrets)
    assert out.count("has a Secret") == len(apart)
    assert (output / "secrets/.gitignore").read_text() == "*\n" and not (output / ".gitignore").exists()
    everything = "".join(path.read_text() for path in output.rglob("*.yaml"))
    assert base64.b64encode((made.folder / "ca/ca.key").read_bytes()).decode() not in everything


@pytest.mark.parametrize("separate", [[], ["--separate-secrets"]])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_with_a_secret_are_for_their_owner_alone(made, tmp_path, separate, umask):
    before = os.umask(umask)
    try:
        for _ in range(2):  # also those that are replaced
            files = rendered(made.folder, tmp_path / "k8s", *DATA, *separate)
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / "k8s" / name).stat().st_mode) for name in files}
    with_secret = {name for name, objects in files.items() if any(one["kind"] == "Secret" for one in objects)}
    assert len(with_secret) == 1 + len(SITES)
    assert {modes[name] for name in with_secret} == {0o600}
    assert {modes[name] for name in files.keys() - with_secret} <= {0o666 & ~umask}
    assert not [path for path in (tmp_path / "k8s").rglob(".writing-*")]


def test_a_file_with_a_secret_is_closed_before_anything_is_in_it(made, tmp_path, monkeypatch):
    seen, fdopen = [], os.fdopen

    def watching(descriptor, *arguments, **more):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return fdopen(descriptor, *arguments, **more)

    monkeypatch.setattr(os, "fdopen", watching)
    before = os.umask(0)
    try:
        rendered(made.folder, tmp_path / "k8s", *DATA)
    finally:
        os.umask(before)
    assert len(seen) >= 1 + len(SITES) and set(seen) == {0o600}


def test_secrets_are_the_files_that_provision_made(made, tmp_path):
    files = rendered(made.folder, tmp_path / "k8s", *DATA)
    (secret,) = [one for one in files["server.yaml"] if one["kind"] == "Secret"]
    assert {name: base64.b64decode(content) for name, content in secret["data"].items()} == {
        name: (made.server.folder / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key")
    }
    for site in SITES:
        shutil.unpack_archive(made.archive(site), tmp_path)
        (secret,) = [one for one in files[f"sites/{site}.yaml"] if one["kind"] == "Secret"]
        assert {name: base64.b64decode(content) for name, content in secret["data"].items()} == {
            path.name: path.read_bytes() for path in (tmp_path / site).iterdir()
        }
    keys = named(files["server.yaml"], "ConfigMap", "tepal-server-nodes")["data"]
    assert keys == {path.name: path.read_text() for path in made.server.nodes.iterdir()}


def bundles(app, target):
    """The files that sites get of an app: by the copy that `tepal server` makes, and by Flower alone."""
    staged = {path.as_posix() for path in stage_app(app, target)}
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        return staged, set(bundle.namelist())


@pytest.mark.parametrize("separate", [[], ["--separate-secrets"]])
def test_no_bundle_of_an_app_has_what_is_written_in_it(tmp_path, monkeypatch, separate):
    app = tmp_path / "ward7"
    write_app(app)
    monkeypatch.chdir(app)
    assert tepal("make", "fleet", "--host", "fl.example.org", "--site", "north", "--unpacked")[0] == 0
    assert {"server.yaml", "sites/north.yaml"} <= set(rendered(Path("fleet"), Path("k8s"), *DATA, *separate))
    for files in bundles(app, tmp_path / "staged"):
        assert {"pyproject.toml", "ward7/task.py"} <= files
        assert not [name for name in files if name.startswith(("k8s/", "fleet/"))]


@pytest.mark.parametrize(
    ("ignored", "settings", "output", "more", "allowed"),
    [
        ("", "", "manifests", (), False),
        ("", "", ".", (), False),
        ("", "", "../manifests", (), True),
        ("/manifests/", "", "manifests/new", (), True),
        ("secrets/", "", "manifests", ("--separate-secrets",), True),
        ("secrets/", "", "manifests", (), False),
        ("", 'fab-include = ["/ward7/*.py"]', "manifests", (), True),
        ("", 'fab-exclude = ["/manifests/**"]', "manifests", (), False),
    ],
)
def test_an_output_in_an_app_is_refused_where_its_bundle_would_have_secrets(
    made, tmp_path, monkeypatch, ignored, settings, output, more, allowed
):
    app = tmp_path / "ward7"
    write_app(app)
    (app / ".gitignore").write_text(f"{ignored}\n")
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("[tool.flwr.app]\n", f"[tool.flwr.app]\n{settings}\n"))
    monkeypatch.chdir(app)
    before = set(app.rglob("*"))
    status, _, said = tepal("kubernetes", made.folder, "--output", output, *DATA, *more)
    assert (status == 0) == allowed, said
    if allowed:
        _, files = bundles(app, tmp_path / "staged")
        assert "ward7/task.py" in files and not [name for name in files if "Secret" in read_in(app, name)]
    else:
        assert set(app.rglob("*")) == before
        assert f"the bundle of the Flower app {app}, which every site receives" in said


def read_in(app, name):
    """The text of a file of a bundle that the app's folder has; of Flower's own ""."""
    return (app / name).read_text() if (app / name).exists() else ""


def test_each_folder_with_secrets_is_hidden_unless_it_has_rules_or_a_repository(made, tmp_path):
    output = tmp_path / "k8s"
    output.mkdir()
    (output / ".gitignore").write_text("*.bak\n")
    rendered(made.folder, output, *DATA)
    assert ((output / ".gitignore").read_text(), (output / "sites/.gitignore").read_text()) == ("*.bak\n", "*\n")
    (tmp_path / "checkout/.git").mkdir(parents=True)
    rendered(made.folder, tmp_path / "checkout", *DATA)
    assert not (tmp_path / "checkout/.gitignore").exists()


# Changes --------------------------------------------------------------------------------------------------------------


def changed(before, after):
    """(kind, name) of the server's objects that differ."""
    old = {(one["kind"], one["metadata"]["name"]): one for one in before["server.yaml"]}
    new = {(one["kind"], one["metadata"]["name"]): one for one in after["server.yaml"]}
    assert old.keys() == new.keys()
    return {name for kind, name in old if old[kind, name] != new[kind, name]}


def test_sites_that_come_and_go_do_not_restart_the_server(own, tmp_path):
    before = rendered(own.folder, tmp_path / "1", *DATA)
    add(own.folder, sites=["west"])
    added = rendered(own.folder, tmp_path / "2", *DATA)
    assert changed(before, added) == {"tepal-server-nodes"} and added.keys() - before.keys() == {"sites/west.yaml"}
    moved = revoke(own.server, "north")
    gone = rendered(own.folder, tmp_path / "3", *DATA)
    assert changed(added, gone) == {"tepal-server-nodes", "tepal-server-revoked"}
    assert list(named(gone["server.yaml"], "ConfigMap", "tepal-server-revoked")["data"]) == [moved.name]
    assert added.keys() - gone.keys() == {"sites/north.yaml"}
    status, _, said = tepal("kubernetes", own.folder, "--output", tmp_path / "4", *DATA, "--site", "north")
    assert status == 1 and "there is no authorised site north; the authorised sites are: South_1., west, y" in said
    assert not (tmp_path / "4").exists()


def test_a_new_certificate_key_or_setting_starts_a_new_pod(own, tmp_path):
    def templates(output, *more):
        files = rendered(own.folder, tmp_path / output, *DATA, *more)
        return [json.dumps(deployment["spec"]["template"]) for deployment, _ in deployments(files)]

    first = templates("1")
    assert templates("2") == first, "the same folder gives the same manifests"
    renew_server(own.folder)
    second = templates("3")
    assert [old == new for old, new in zip(first, second, strict=True)] == [False, True, True, True]
    renew_site(own.folder, "north")
    third = templates("4")
    assert [old == new for old, new in zip(second, third, strict=True)] == [True, False, True, True]
    fourth = templates("5", "--run-config", "num-server-rounds=2", "--node-config", "batch-size=8")
    assert [old == new for old, new in zip(third, fourth, strict=True)] == [False] * 4


def test_one_site_can_be_rendered_from_its_archive_alone(made, tmp_path):
    whole = rendered(made.folder, tmp_path / "all", *DATA)
    shutil.unpack_archive(made.archive("y"), tmp_path)
    for path in (made.archive("y"), tmp_path / "y"):
        alone = rendered(path, tmp_path / "one", *DATA)
        assert alone == {"sites/y.yaml": whole["sites/y.yaml"]}
    for more in (["--server"], ["--site", "north"]):
        status, _, said = tepal("kubernetes", made.archive("y"), "--output", tmp_path / "no", *DATA, *more)
        assert status == 1 and ("has a site's credentials alone" in said or "no authorised site north" in said)


# Names ----------------------------------------------------------------------------------------------------------------

site_names = st.from_regex(NAME, fullmatch=True)


@settings(deadline=None)
@given(site_names)
def test_every_site_name_gives_dns_labels(name):
    label = label_of(name)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", label)
    assert len(f"tepal-site-{label}-settings") <= 63
    if DNS_LABEL.fullmatch(name) and "--" not in name and len(name) <= 40:
        assert label == name, "a plain name stays as it is"


@settings(deadline=None)
@given(st.sets(site_names, min_size=2, max_size=6))
def test_different_sites_have_different_labels(names):
    assert len({label_of(name) for name in names}) == len(names)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from("-_.").flatmap(lambda mark: st.text(f"aB1{mark}", min_size=1, max_size=60)).filter(NAME.fullmatch)
)
def test_similar_names_have_different_labels(name):
    others = {name.replace("_", "."), name.replace(".", "-"), name.lower(), name + "_", name.replace("_", "-")}
    assert len({label_of(each) for each in {name, *others}}) == len({name, *others})


def test_two_sites_whose_objects_would_have_one_name_are_refused(tmp_path):
    taken = label_of("a_b")
    made = make(tmp_path / "fl", hosts=["fl.example.org"], sites=["a_b", taken])
    status, _, said = tepal("kubernetes", made.folder, "--output", tmp_path / "k8s", *DATA)
    assert status == 1 and f"the objects of the sites {taken} and a_b would have one name" in said


# YAML and values ------------------------------------------------------------------------------------------------------

PUZZLES = [
    "y", "N", "on", "Off", "yes", "null", "~", "", "1e5", "1e-5", "0o14", "0x1F", "0b1", "1_000", ".5", ".inf", ".nan",
    "2026-11-27", "12:30:00", "a: b", "- x", "# x", "&a", "*a", "!x", "=", "<<", "{}", "[]", "|", ">", "@x", "%x",
    "a\nb", " a", "a ", "é", "\x7f", "TRUE", "NaN", "Infinity", "+1", "-1", "?", "`", "'", '"', "\\",
]  # fmt: skip


def could_be_something_else(text):
    """Whether some reader of YAML 1.1 or 1.2, or Go's or Python's numbers, takes this unquoted text for no text."""
    if text.lower() in ("", "~", "y", "n", "yes", "no", "on", "off", "true", "false", "null") or text[:1] in "=<&*!":
        return True
    for number in (float, lambda digits: int(digits, 0), lambda digits: int(digits.replace(":", ""), 10)):
        try:
            number(text)
        except ValueError:
            continue
        return text.lower() not in ("nan", "infinity", "inf")  # YAML's have a dot before them
    return bool(re.match(r"\d{4}-\d", text))


@settings(deadline=None)
@given(st.one_of(st.sampled_from(PUZZLES), site_names, st.text(string.printable)))
def test_text_is_text_for_every_reader_of_yaml(text):
    written = to_yaml([{"kind": "ConfigMap", "data": {"key": text}}])
    assert list(yaml.safe_load_all(written)) == [{"kind": "ConfigMap", "data": {"key": text}}]
    *_, scalar = [event for event in yaml.parse(written) if isinstance(event, yaml.ScalarEvent)]
    assert scalar.style == '"' or not could_be_something_else(text)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["data-path", "batch-size", "learning-rate", "fedfrozen.warmup-rounds", "device"]),
        st.one_of(
            st.booleans(), st.integers(-(2**40), 2**40), st.floats(-1e9, 1e9), st.text("ab /.:='\"\\\n", max_size=12)
        ),
    )
)
def test_a_config_is_the_same_after_the_environment_or_is_refused(config):
    try:
        text = as_pairs(config, "--node-config")
    except ValueError as error:
        assert "cannot be written on one line" in str(error)
        assert any(isinstance(value, str) and re.search(r"[\n'\"\\]", value) for value in config.values())
        return
    assert "\n" not in text
    found = parse_run_config(filter(None, [text]))
    assert found == config and [*map(type, found.values())] == [*map(type, config.values())]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the place of the examples of site South_1. is not given: expected one of --data-claim NAME"),
        ([*DATA, "--no-data"], "more than one place of the site's examples is given"),
        (["--data-host-path", "data"], "--data-host-path is 'data', expected an absolute path without '..'"),
        (["--data-host-path", "/srv/../etc"], "expected an absolute path without '..'"),
        (["--data-claim", "My_Data"], "--data-claim is 'My_Data', expected the name of an object"),
        ([*DATA, "--namespace", "Fleet"], "--namespace is 'Fleet', expected 1 to 63 lower-case letters"),
        ([*DATA, "--namespace", "a" * 64], "expected 1 to 63 lower-case letters"),
        ([*DATA, "--create-namespace"], "--create-namespace is given without --namespace: name it"),
        ([*DATA, "--registry", "https://registry.example.org"], "HOST[:PORT][/PATH] without https://"),
        ([*DATA, "--tag", "a b"], "--tag is 'a b'"),
        ([*DATA, "--site-image", "Tepal"], "--site-image is 'Tepal', expected the name of an image below --registry"),
        ([*DATA, "--service", "loadbalancer"], "expected ClusterIP, LoadBalancer, NodePort"),
        ([*DATA, "--service", "NodePort"], "sites connect to port 9443, and a NodePort is from 30000 to 32767"),
        ([*DATA, "--site-memory", "2g"], "--site-memory is '2g', expected a size with its unit such as 512Mi, 2Gi"),
        ([*DATA, "--site-memory", "2"], "--site-memory is '2', expected a size with its unit"),
        ([*DATA, "--server-storage", "0.5"], "--server-storage is '0.5', expected a size with its unit"),
        ([*DATA, "--site-memory", "400m"], "--site-memory is '400m'"),
        ([*DATA, "--server-storage", "0Gi"], "--server-storage is '0Gi'"),
        ([*DATA, "--server-cpus", "two"], "--server-cpus is 'two', expected a number of CPUs"),
        ([*DATA, "--site-cpus", "0"], "--site-cpus is '0'"),
        ([*DATA, "--node-selector", "gpu"], "--node-selector is 'gpu', expected key=value"),
        ([*DATA, "--storage-class", "Fast SSD"], "--storage-class is 'Fast SSD'"),
        ([*DATA, "--site", "west"], "there is no authorised site west; the authorised sites are: South_1., north, y"),
        ([*DATA, "--run-config", "rounds"], "is not of the form"),
        ([*DATA, "--node-config", "batch-size=many"], "many is not a TOML value"),
    ],
)
def test_what_makes_no_sense_is_refused_with_words_before_anything_is_written(made, tmp_path, arguments, words):
    status, out, said = tepal("kubernetes", made.folder, "--output", tmp_path / "k8s", *arguments)
    assert (status, out) == (1, "") and words in said
    assert not (tmp_path / "k8s").exists()


def test_folders_that_cannot_be_used_are_refused_with_words(own, tmp_path):
    def said(folder, output=tmp_path / "k8s"):
        status, _, words = tepal("kubernetes", folder, "--output", output, *DATA)
        assert status == 1 and not (tmp_path / "k8s").exists()
        return words

    assert "is not a folder that `tepal provision make` wrote" in said(tmp_path)
    assert "does not exist: name the folder" in said(tmp_path / "west.tar.gz")
    assert "is a copy of the server's part alone" in said(own.server.folder)
    (tmp_path / "x.tar.gz").write_text("no archive")
    assert "cannot be read as a site's archive" in said(tmp_path / "x.tar.gz")
    (tmp_path / "file").touch()
    assert "--output" in said(own.folder, tmp_path / "file")
    # The archive of the old key, put back by mistake.
    old = own.archive("north").read_bytes()
    renew_site(own.folder, "north")
    own.archive("north").write_bytes(old)
    assert "has another key than" in said(own.folder) and "renew FOLDER --site north" in said(own.folder)
    own.archive("north").unlink()
    assert "does not exist. Restore it" in said(own.folder)


def test_a_node_port_is_the_port_of_the_credentials(tmp_path):
    made = make(tmp_path / "fl", hosts=["fl.example.org"], sites=["north"], port=30092)
    files = rendered(made.folder, tmp_path / "k8s", "--server", "--service", "NodePort")
    (service,) = [one["spec"] for one in files["server.yaml"] if one["kind"] == "Service"]
    assert service["type"] == "NodePort" and files.keys() == {"server.yaml"}
    assert service["ports"][0]["nodePort"] == service["ports"][0]["port"] == 30092


def test_sites_of_both_forms_are_read(tmp_path):
    made = make(tmp_path / "fl", hosts=["fl.example.org"], sites=["north"], unpacked=True)
    files = rendered(made.folder, tmp_path / "k8s", *DATA)
    (secret,) = [one["data"] for one in files["sites/north.yaml"] if one["kind"] == "Secret"]
    assert base64.b64decode(secret["node.key"]) == read_site(made.unpacked("north")).key.read_bytes()


def test_more_keys_than_an_object_takes_are_refused(own, tmp_path):
    one = (own.server.nodes / "north.pub").read_text()
    for k in range(500):
        (own.server.nodes / f"s{k}.pub").write_text(one)
    rendered(own.folder, tmp_path / "500", "--server")
    for k in range(500, 2**18 // len(one)):
        (own.server.nodes / f"s{k}.pub").write_text(one)
    status, _, said = tepal("kubernetes", own.folder, "--output", tmp_path / "k8s", "--server")
    assert status == 1 and "ConfigMap tepal-server-nodes has" in said and "kubectl apply takes" in said


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_reads_the_files(made, tmp_path):
    """By the types of its own, without a cluster."""
    import subprocess

    files = rendered(made.folder, tmp_path / "k8s", *VARIANTS["all"])
    for name, objects in files.items():
        command = ["kubectl", "annotate", "--local", "-f", tmp_path / "k8s" / name, "a=b", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KUBECONFIG": os.devnull})
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('"kind"') >= len(objects)
