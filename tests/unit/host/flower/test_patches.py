"""What the warm node relies on inside of Flower: a newer Flower that lacks it fails here, and says what."""

import importlib
import inspect
import re
import time
from pathlib import Path

import grpc
import pytest
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto import runtime_pb2
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects
from flwr.supercore.retry import RetryInvoker

from tepal.host.flower import refusals, supernode
from tepal.host.flower.link import Link
from tepal.host.flower.patches import FLOWER, UnsupportedFlowerVersion, change, quick, require_flower


def test_the_known_version_is_the_pinned_and_the_installed_one():
    require_flower()
    require_flower(FLOWER)


def test_another_version_is_refused_with_what_to_do():
    with pytest.raises(UnsupportedFlowerVersion) as refusal:
        require_flower("1.40.0")
    words = str(refusal.value)
    assert f"supports flwr {FLOWER}" in words and "flwr 1.40.0 is installed" in words
    assert f"Install flwr=={FLOWER}" in words and "`flower-supernode`" in words


@pytest.mark.parametrize(
    ("module", "name"), [("flwr.supernode.start_client_internal", "no_such_name"), ("flwr.no_such_module", "anything")]
)
def test_a_name_that_flower_does_not_have_is_not_changed(module, name):
    with pytest.raises(UnsupportedFlowerVersion, match=re.escape(f"no {module}.{name}, which Tepal changes")):
        change(module, name, lambda before: before)


def test_a_name_is_changed_to_what_is_made_of_the_one_before(monkeypatch):
    module = importlib.import_module("flwr.supernode.start_client_internal")
    before = module.pull_objects
    monkeypatch.setattr(module, "pull_objects", before)  # restores it
    change(module.__name__, "pull_objects", lambda pull: ("changed", pull))
    assert module.pull_objects == ("changed", before)


def test_an_object_that_has_not_arrived_is_looked_for_soon_again():
    looks = []

    def pull(object_id):
        looks.append(object_id)
        if len(looks) < 5:
            raise ObjectUnavailableError(object_id)
        return b"content"

    began = time.monotonic()
    assert quick(pull_objects)(["a"], pull) == {"a": b"content"}
    assert time.monotonic() - began < 2, "Flower would have waited 1 + 2 + 4 + 8 seconds"


QUICK = ("initial_backoff", "backoff_cap", "max_tries_per_object")
HANDLERS = "flwr.supernode.servicer.runtime.runtime_handlers"
CONNECTION = "flwr.client.grpc_rere_client.connection"
START = "flwr.supernode.start_client_internal"
STATE = "flwr.supernode.nodestate.in_memory_nodestate.InMemoryNodeState"
MEMORY = "flwr.server.superlink.linkstate.in_memory_linkstate.InMemoryLinkState"

# Name in Flower → the parameters that are given to it, or that it must have.
RELIED_ON = {
    f"{START}.pull_objects": QUICK,
    f"{START}.grpc_request_response": ("server_address", "insecure", "retry_invoker"),
    f"{START}.register_signal_handlers": ("event_type", "exit_message", "grpc_servers"),
    f"{START}._make_fleet_connection_retry_invoker": ("max_retries", "max_wait_time", "connection_error_type"),
    f"{START}._pull_and_store_message": ("state", "receive", "confirm_message_received"),
    f"{START}._push_messages": ("state", "send"),
    f"{CONNECTION}.flwr_exit": ("code", "message"),
    f"{CONNECTION}.create_channel": (
        "server_address", "insecure", "root_certificates", "max_message_length", "interceptors",
    ),
    f"{CONNECTION}.HeartbeatSender": ("heartbeat_fn",),
    "flwr.supernode.cli.flower_supernode.NodeStateFactory": ("objectstore_factory",),
    "flwr.supernode.cli.flower_supernode.flower_supernode": (),
    "flwr.supernode.cli.flower_supernode.HTTP_SERVER_SHUTDOWN_TIMEOUT": (),
    "flwr.superlink.grid.http_grid.HttpGrid._try_push_messages": ("run_id", "messages"),
    "flwr.superlink.grid.http_grid.HttpGrid._runtime_client": (),
    "flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": (),
    "flwr.app.message.array.Array.slice_array": (),
    "flwr.supernode.cli.flower_supernode._start_supernode_http_api": ("config", "state_factory"),
    "flwr.common.serde.recorddict_to_proto": (),
    "flwr.common.serde.recorddict_from_proto": (),
    "flwr.common.serde_utils.metadata_to_proto": (),
    "flwr.common.serde_utils.metadata_from_proto": (),
    f"{STATE}.__init__": ("object_store",),
    f"{STATE}.create_task": ("task_type", "run_id"),
    f"{STATE}.store_message": ("message",),
    f"{STATE}.store_message_and_object_tree": ("message", "object_tree", "session_id"),
    f"{STATE}.store_object": ("run_id", "session_id", "object_id", "object_content"),
    f"{STATE}.get_messages": ("run_ids", "is_reply", "limit"),
    f"{STATE}.finish_task": ("task_id", "sub_status", "details"),
    f"{STATE}._on_task_tokens_expired": ("tasks",),
    f"{STATE}._cleanup_expired_task_tokens_locked": (),
    f"{STATE}._cleanup_push_session": ("session_id", "cleanup_messages"),
    f"{STATE}._store_error_replies": ("run_ids", "error"),
    f"{STATE}.record_message_processing_start": ("message_id",),
    "flwr.supernode.nodestate.NodeStateFactory.state": (),
    "flwr.cli.install.install_from_fab": ("install_dir", "skip_prompt"),
    "flwr.clientapp.utils.get_load_client_app_fn": ("default_app_ref", "app_path", "multi_app"),
    "flwr.clientapp.client_app.LoadClientAppError": (),
    "flwr.clientapp.client_app.ClientApp.__call__": ("message", "context"),
    "flwr.supercore.retry.exponential": ("max_delay",),
    **{
        f"{HANDLERS}.{name}": ("request", "state", "task")
        for name in (
            "pull_task_input", "pull_messages", "confirm_message_received", "push_messages", "push_task_output",
        )
    },
    f"{HANDLERS}.acquire_task": ("request", "state"),
    "flwr.supercore.servicer.runtime.runtime_handlers.send_task_heartbeat": ("request", "state", "task"),
    f"{STATE}.get_task_by_token": ("token",),
    f"{STATE}.get_object": ("run_id", "object_id"),
    # tepal.server_app.simulated_grid
    "flwr.superlink.grid.inmemory_grid.InMemoryGrid.push_messages": ("messages",),
    "flwr.superlink.grid.inmemory_grid.InMemoryGrid.pull_messages": ("message_ids",),
    f"{MEMORY}.get_message_ins": ("node_id", "limit"),
    f"{MEMORY}.store_message_ins": ("message",),
    # tepal.server_app.http_grid
    "flwr.superlink.grid.http_grid.HttpGrid.push_messages": ("messages",),
    "flwr.superlink.grid.http_grid.HttpGrid.pull_messages": ("message_ids",),
    "flwr.superlink.grid.http_grid.HttpGrid.send_and_receive": ("messages", "timeout"),
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree": (),
    "flwr.supercore.inflatable.inflatable_protobuf_utils.make_pull_object_fn_protobuf": (
        "pull_object_protobuf", "node", "run_id",
    ),
    "flwr.supercore.inflatable.inflatable_utils.pull_objects": ("object_ids", "pull_object_fn", *QUICK),
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents": ("object_id", "objects"),
    "flwr.supercore.inflatable.inflatable_utils.ObjectPullError": (),
    "flwr.supercore.inflatable.inflatable_utils.ObjectUnavailableError": (),
    "flwr.app.message.make_message": ("metadata", "error"),
}  # fmt: skip


def found(path):
    """The object of a dotted path: its longest beginning that is a module, and then attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            here = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            here = getattr(here, part)
        return here
    raise ImportError(path)


@pytest.mark.parametrize("path", RELIED_ON)
def test_flower_has_what_the_warm_node_uses(path):
    try:
        there = found(path)
    except (ImportError, AttributeError):
        pytest.fail(f"this Flower has no {path}: the warm node, written for {FLOWER}, uses it")
    if parameters := RELIED_ON[path]:
        missing = set(parameters) - set(inspect.signature(there).parameters)
        assert not missing, f"{path} of this Flower has no {', '.join(sorted(missing))}, which the warm node gives it"


def test_the_connection_gives_what_the_warm_node_takes_apart():
    """A node id first, then `receive`; `pull_object`, `push_object` and `confirm_message_received` last."""
    given = str(inspect.signature(found(f"{START}.grpc_request_response")).return_annotation)
    members = "(int, receive, send, get_run, get_fab, pull_object, push_object, confirm)"
    assert given.count("Callable[") == 7, f"grpc_request_response gives {given}, expected {members}"
    assert re.search(r"Iterator\[tuple\[int, ", given), f"the node id is not the first of {given}"
    last = "Callable[[int, str], bytes], Callable[[int, str, str, bytes], None], Callable[[int, str], None]]]"
    ends = given.replace("collections.abc.", "").endswith(last)
    assert ends, f"pull_object, push_object and confirm_message_received are not the last of {given}"


def test_the_main_loop_asks_for_replies_and_creates_a_task_before_it_stores_the_message():
    pull, push = (inspect.getsource(found(f"{START}.{name}")) for name in ("_pull_and_store_message", "_push_messages"))
    assert pull.index("state.create_task(") < pull.index("state.store_message(message)") < pull.index("pull_objects(")
    assert "state.get_messages(is_reply=True)" in push, "PromptState waits in that call"
    assert "delete_messages(" in push[push.index("finally:") :], "a sent reply takes its message with it"


def test_the_nodes_state_has_the_fields_that_are_read_and_changed():
    from flwr.supercore.object_store import ObjectStoreFactory

    state = found(STATE)(ObjectStoreFactory().store())
    for name in ("msg_store", "lock_msg_store", "task_store", "lock_task_store", "object_store"):
        assert hasattr(state, name), f"InMemoryNodeState of this Flower has no {name}"
    for name in ("_object_push_sessions", "_object_push_session_by_root", "_lock_object_push_sessions"):
        assert hasattr(state, name), f"InMemoryNodeState of this Flower has no {name}"
    with state._lock_object_push_sessions, state._lock_object_push_sessions, state.lock_msg_store, state.lock_msg_store:
        session = state._object_push_sessions[state.start_session(1)]
    assert hasattr(session, "pending_object_ids")


def test_retries_can_be_changed_after_they_are_made():
    invoker = RetryInvoker(lambda: iter([0.0]), ValueError, None, None)
    for name in ("wait_gen_factory", "should_giveup", "on_backoff", "max_time"):
        assert hasattr(invoker, name), f"RetryInvoker of this Flower has no {name}"


def test_constants_and_messages_have_the_values_and_fields_that_are_used():
    assert (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.CLIENT_APP_CRASHED) == (2, 8)
    assert ErrorCode.LOAD_CLIENT_APP_EXCEPTION == 1
    assert SubStatus.FAILED != SubStatus.COMPLETED
    runtime_pb2.AcquireTaskRequest(supported_task_types=["x"])
    runtime_pb2.PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="why")
    assert {"task", "token"} <= set(runtime_pb2.AcquireTaskResponse.DESCRIPTOR.fields_by_name)
    assert "success" in runtime_pb2.SendTaskHeartbeatResponse.DESCRIPTOR.fields_by_name


def test_everything_that_is_replaced_in_the_supernode_is_found_and_used(monkeypatch):
    """`change_flower` on the Flower that is installed, and undone again."""
    changed = []

    def remembering(module, name, changed_to):
        there = importlib.import_module(module)
        monkeypatch.setattr(there, name, getattr(there, name))  # restores it
        changed.append(f"{module}.{name}")
        change(module, name, changed_to)

    monkeypatch.setattr(supernode, "change", remembering)
    link, there = Link.pair()
    supernode.change_flower(link, supernode.Prompt(link, 1.0), Path("runtime"))
    start = importlib.import_module(START)
    (pulls,) = start.pull_objects.args
    assert pulls.keywords == {"initial_backoff": 0.02, "backoff_cap": 0.5, "max_tries_per_object": None}
    invoker = start._make_fleet_connection_retry_invoker(
        max_retries=None, max_wait_time=None, connection_error_type=grpc.RpcError
    )
    waits = invoker.wait_gen_factory()
    assert max(next(waits) for _ in range(10)) == 5.0, "a SuperLink that is gone is asked every five seconds"
    connection = importlib.import_module(CONNECTION)
    assert connection.create_channel is refusals.channel
    assert connection.HeartbeatSender(lambda: 1 / 0).heartbeat_fn() is False
    assert len(set(changed)) >= 6 and set(changed) <= set(RELIED_ON)
    link.close()
    there.close()
