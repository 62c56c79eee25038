"""The SuperNode's changed insides, with Flower's own main loop on one side and its Runtime handlers on the other."""

import contextlib
import datetime
import functools
import hashlib
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushAppMessagesRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.servicer.runtime import runtime_handlers as core_handlers
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.servicer.runtime import runtime_handlers

from tepal.host.flower import supernode
from tepal.host.flower.link import Link
from tepal.host.flower.patches import quick
from tepal.host.flower.refusals import explain_refusal, report_refusal
from tepal.host.flower.supernode import Prompt, PromptState, PromptStateFactory

NODE = 7


def bundle(**files):
    """The bundle of an app with these files: `client_app` is the text of client_app.py."""
    project = """
        [project]
        name = "tiny"
        version = "1.0.0"
        description = "An app for tests"
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "tests"
        [tool.flwr.app.components]
        serverapp = "server_app:app"
        clientapp = "client_app:app"
        """
    texts = {"pyproject.toml": textwrap.dedent(project), "server_app.py": "app = None\n"}
    texts |= {f"{name.replace('__', '/')}.py": text for name, text in files.items()}
    content, _ = build_fab_from_files({name: text.encode() for name, text in texts.items()})
    return Fab(hash_str="", content=content, verifications={})


class FlowerLoop:
    """A PromptState with the SuperNode's main loop in a thread, and what stands in for its SuperLink.

    Args:
        bundles: run id → bundle of its app.
        state_class: of the node's state.
    """

    def __init__(self, bundles, *, state_class=PromptState):
        self.link, end = Link.pair()
        self.said = []
        self._other = Link(end)
        threading.Thread(target=lambda: self.said.extend(iter(self._hear, None)), daemon=True).start()
        self.factory = PromptStateFactory(ObjectStoreFactory(), self.link)
        self.state = self.factory.state_instance = state_class(self.factory.objectstore_factory.store(), self.link)
        self.state.set_node_id(NODE)
        self.replies = {}  # id of the message → (the reply without its content, its objects)
        self.sent_at = {}
        self.on_task = None  # what hears of a new task
        self.fetched = set()  # ids of messages that are here as a whole
        self.may_fetch = threading.Event()
        self.may_fetch.set()
        self._bundles = bundles
        self._waiting = []
        self._contents = {}
        self._came = threading.Condition()
        self._end = False
        self._thread = threading.Thread(target=self._run, name="main loop", daemon=True)
        self._thread.start()

    def _hear(self):
        for event in self._other:
            if event["event"] == "task" and self.on_task:
                self.on_task()
            return event
        return None

    def send(self, run=1, **metrics):
        """Let a message of a run be on the SuperLink; return its id."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
        content = RecordDict({"n": MetricRecord({"sent": time.time(), **metrics}), "a": ArrayRecord([np.arange(5.0)])})
        message = Message(content, dst_node_id=NODE, message_type="train", group_id="3")
        message.metadata.__dict__["_message_id"] = message.object_id
        with self._came:
            self._waiting.append(message)
            self._came.notify_all()
        return message.metadata.message_id

    def reply(self, message_id, timeout=10.0):
        """Wait for the reply to a message."""
        with self._came:
            assert self._came.wait_for(lambda: message_id in self.replies, timeout), "no reply came"
            return self.replies[message_id][0]

    def metrics(self, message_id, timeout=10.0):
        """Wait for the reply to a message, and return its record of metrics."""
        reply = self.reply(message_id, timeout)
        assert not reply.has_error(), reply.error
        whole = inflate_object_from_contents(reply.metadata.message_id, dict(self.replies[message_id][1]))
        return dict(whole.content["metrics"])

    def stop(self):
        self._end = True
        with self._came:
            self._came.notify_all()
        self.link.close()
        self._other.close()
        # Else its last lines are in the log of another test. It waits on for a reply that nobody sends.
        self._thread.join(2)

    def _run(self):
        while not self._end:
            run_id = start_client_internal._pull_and_store_message(
                state=self.state, object_store=self.state.object_store, node_config={}, receive=self._receive,
                get_run=self._get_run, get_fab=lambda fab_hash, run: self._bundles[run], trusted_entities=None,
                pull_object=self._pull,
                confirm_message_received=lambda run, message: self.fetched.add(message),
            )  # fmt: skip
            if run_id is None or self._end:
                continue
            start_client_internal._push_messages(
                state=self.state, object_store=self.state.object_store, send=self._send,
                push_object=lambda run, session, object_id, content: self._push(session, object_id, content),
            )  # fmt: skip

    def _receive(self):
        with self._came:
            self._came.wait_for(lambda: self._waiting or self._end, 600)
            if self._end:
                return None
            message = self._waiting.pop(0)
        self._contents = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
        tree = get_object_tree(message)
        message = remove_content_from_message(message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message, tree

    def _get_run(self, run_id):
        run = Run.create_empty(run_id)
        run.fab_id, run.fab_version, run.series_id = "tests/tiny", "1.0.0", run_id
        run.fab_hash = hashlib.sha256(self._bundles[run_id].content).hexdigest()
        return run

    def _send(self, message, tree, seconds):
        objects = {}
        with self._came:
            self._pushing = (message, objects)
            if message.metadata.reply_to_message_id in self.replies:
                self.twice = message
        wanted = {node.object_id for node in iterate_object_tree(tree)}
        threading.Thread(target=self._finish, args=(message, objects, wanted), daemon=True).start()
        return wanted, message.metadata.message_id

    def _pull(self, run, object_id):
        assert self.may_fetch.wait(10)
        return self._contents[object_id]

    def _push(self, session, object_id, content):
        self._pushing[1][object_id] = content

    def _finish(self, message, objects, wanted):
        while set(objects) != wanted:
            time.sleep(0.001)
        with self._came:
            self.replies[message.metadata.reply_to_message_id] = (message, objects)
            self.sent_at[message.metadata.reply_to_message_id] = time.monotonic()
            self._came.notify_all()


class Unknown(Exception):
    """The SuperNode does not know the token."""


class InProcess:
    """What `RuntimeHttpClient` does, without HTTP: Flower's handlers on a state, for the task of a token."""

    def __init__(self, state, token):
        self._state = state
        self._token = token

    def __getattr__(self, name):
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
        handler = getattr(runtime_handlers, snake, None) or getattr(core_handlers, snake)

        def call(request):
            task = self._state.get_task_by_token(self._token)
            if task is None:
                raise Unknown(name)
            return handler(request, self._state, task)

        return call


def acquire(loop, seconds=5.0):
    """Take the next task, as an executor does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        acquired = runtime_handlers.acquire_task(request, loop.state)
        if acquired.token:
            return InProcess(loop.state, acquired.token)
        time.sleep(0.005)
    raise AssertionError("there is no task")


def answer_to(message, **metrics):
    arrays = ArrayRecord({"a": Array(np.arange(10.0)), "b": Array(np.ones(3))})
    return Message(RecordDict({"metrics": MetricRecord(metrics or {"x": 1}), "arrays": arrays}), reply_to=message)


def push_in_part(client, reply):
    """Announce a reply, and push all its objects but the last; return what pushes that one."""
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = {name: thing.deflate() for name, thing in get_all_nested_objects(reply).items()}
    tree = get_object_tree(reply)
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(reply))], message_object_trees=[tree]
    )
    answer = client.PushMessages(request)
    *first, last = answer.objects_to_push

    def push(object_id):
        content, session = objects[object_id], answer.session_id
        request = PushObjectRequest(object_id=object_id, object_content=content, session_id=session)
        return client.PushObject(request).stored

    assert all(push(object_id) for object_id in first)
    return lambda: push(last)


def end(client, sub_status, details=""):
    client.PushTaskOutput(PushTaskOutputRequest(sub_status=sub_status, details=details))


@pytest.fixture(scope="module")
def tiny():
    return bundle(client_app="app = None\n")


@pytest.fixture
def loop(tiny):
    running = FlowerLoop({1: tiny, 2: tiny})
    yield running
    running.stop()


def test_a_message_is_answered_by_its_app_and_nothing_of_it_stays(loop):
    sent = loop.send()
    client = acquire(loop)
    message, context, run, _ = run_clientapp.pull_task_input(client)
    assert (run.run_id, context.node_id, message.metadata.group_id) == (1, NODE, "3")
    run_clientapp.push_message(client, answer_to(message, x=5), context)
    end(client, SubStatus.COMPLETED)
    assert loop.metrics(sent) == {"x": 5}
    wait_until(lambda: not loop.state.msg_store)
    assert len(loop.state.object_store) == 0


def wait_until(condition, seconds=15.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("pulled", [True, False], ids=["after", "before"])
def test_a_task_that_fails_without_a_reply_is_answered_at_once_with_its_reason(loop, pulled):
    """Also when its process died before it asked for the message."""
    sent = loop.send()
    wait_until(lambda: sent in loop.fetched)
    client = acquire(loop)
    if pulled:
        run_clientapp.pull_task_input(client)
    began = time.monotonic()
    end(client, SubStatus.FAILED, "the dog ate it")
    reply = loop.reply(sent)
    assert loop.sent_at[sent] - began < 5
    assert (reply.error.code, reply.error.reason) == (8, "the dog ate it")
    wait_until(lambda: not loop.state.msg_store)
    assert len(loop.state.object_store) == 0


def test_a_task_that_fails_while_its_message_is_being_fetched_is_answered(loop):
    """A large model takes long to fetch, and the executor has the task before."""
    loop.may_fetch.clear()
    sent = loop.send()
    client = acquire(loop)
    end(client, SubStatus.FAILED, "killed before the model was there")
    loop.may_fetch.set()
    assert loop.reply(sent, timeout=4).error.reason == "killed before the model was there"


def test_a_failed_task_without_a_reason_still_has_one(loop):
    sent = loop.send()
    wait_until(lambda: sent in loop.fetched)
    end(acquire(loop), SubStatus.FAILED)
    assert loop.reply(sent).error.reason == "ClientApp ended."


def test_an_error_that_the_app_has_answered_with_is_the_only_answer(loop):
    sent = loop.send()
    client = acquire(loop)
    message, context, *_ = run_clientapp.pull_task_input(client)
    run_clientapp.push_message(client, Message(Error(2, "the app's own"), reply_to=message), context)
    end(client, SubStatus.FAILED, "not this one")
    reply = loop.reply(sent)
    assert (reply.error.code, reply.error.reason) == (2, "the app's own")
    time.sleep(0.1)
    assert not hasattr(loop, "twice")


def test_a_message_that_was_answered_is_not_answered_again_when_the_next_of_its_run_is_there(loop):
    first = loop.send()
    client = acquire(loop)
    message, context, *_ = run_clientapp.pull_task_input(client)
    run_clientapp.push_message(client, answer_to(message), context)
    assert not loop.reply(first).has_error()
    second = loop.send()  # it comes before the first one's process has said how it ended
    wait_until(lambda: any(m.message.metadata.message_id == second for m in list(loop.state.msg_store.values())))
    end(client, SubStatus.FAILED, "it failed after its reply")
    time.sleep(0.1)
    assert second not in loop.replies and not loop.replies[first][0].has_error()
    client = acquire(loop)
    message, context, *_ = run_clientapp.pull_task_input(client)
    run_clientapp.push_message(client, answer_to(message, x=2), context)
    end(client, SubStatus.COMPLETED)
    assert loop.metrics(second) == {"x": 2}
    assert not hasattr(loop, "twice")


def test_a_reply_is_sent_when_its_last_object_is_there(loop):
    sent = loop.send()
    client = acquire(loop)
    message, *_ = run_clientapp.pull_task_input(client)
    push_last = push_in_part(client, answer_to(message, x=9))
    time.sleep(0.2)
    assert sent not in loop.replies
    began = time.monotonic()
    assert push_last()
    assert loop.metrics(sent) == {"x": 9}
    assert loop.sent_at[sent] - began < 2.5, "Flower itself looks every 3 s"


def test_a_reply_that_is_there_in_part_is_dropped_when_its_task_fails(loop):
    sent = loop.send()
    client = acquire(loop)
    message, *_ = run_clientapp.pull_task_input(client)
    push_last = push_in_part(client, answer_to(message))
    end(client, SubStatus.FAILED, "killed while it sent its answer")
    reply = loop.reply(sent)
    assert (reply.error.code, reply.error.reason) == (8, "killed while it sent its answer")
    with pytest.raises(Unknown):
        push_last()
    wait_until(lambda: not loop.state.msg_store)
    assert len(loop.state.object_store) == 0, "nothing of the dropped reply stays"


def test_a_reply_whose_objects_are_known_already_is_sent(loop):
    """Pushed twice, as after an answer of the SuperNode that was lost: the second time nothing is missing."""
    sent = loop.send()
    client = acquire(loop)
    message, context, *_ = run_clientapp.pull_task_input(client)
    reply = answer_to(message, x=4)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    store = loop.state.object_store
    store.preregister(1, get_object_tree(reply))
    for name, thing in get_all_nested_objects(reply).items():
        store.put(name, thing.deflate())
    run_clientapp.push_message(client, reply, context)
    assert loop.metrics(sent) == {"x": 4}


def test_a_message_that_is_stored_a_moment_after_its_task_is_found(tiny):
    class Late(PromptState):
        def store_message(self, message):
            if not message.metadata.reply_to_message_id:
                time.sleep(0.3)
            return super().store_message(message)

    loop = FlowerLoop({1: tiny}, state_class=Late)
    sent = loop.send()
    message, *_ = run_clientapp.pull_task_input(acquire(loop))
    assert message.metadata.message_id == sent
    loop.stop()


def test_the_executor_is_told_of_a_task_when_its_message_is_there(loop):
    loop.send()
    wait_until(lambda: [event["event"] for event in loop.said] == ["task"])
    assert loop.state.get_messages(run_ids=[1], is_reply=False, limit=1)


def expire_tokens(state):
    """Let no sign of life have come for too long."""
    with state.lock_task_store:
        for record in state.task_token_store.values():
            record.active_until = record.active_until - datetime.timedelta(seconds=1000)


def test_a_task_of_which_nothing_was_heard_is_answered_after_all(loop, monkeypatch):
    monkeypatch.setattr(supernode, "_CHECK_TOKENS", 0.1)
    sent = loop.send()
    run_clientapp.pull_task_input(acquire(loop))
    expire_tokens(loop.state)
    assert loop.reply(sent).error.code == 8


def test_a_reply_in_part_does_not_wait_for_ever_for_a_sender_of_which_nothing_is_heard(loop, monkeypatch):
    """As after a suspended machine wakes up in the middle of a push."""
    monkeypatch.setattr(supernode, "_CHECK_TOKENS", 0.1)
    sent = loop.send()
    client = acquire(loop)
    message, *_ = run_clientapp.pull_task_input(client)
    push_in_part(client, answer_to(message))
    expire_tokens(loop.state)
    with loop.state._lock_object_push_sessions:  # nor does the push's own limit help
        for session in loop.state._object_push_sessions.values():
            session.expires_at -= datetime.timedelta(seconds=1000)
    assert loop.reply(sent, timeout=2).error.code == 8


def test_a_reply_that_is_announced_while_the_main_loop_looks_for_one_stops_neither(tiny, monkeypatch):
    class Slow(PromptState):
        slow, looking = threading.Event(), threading.Event()

        def _has_complete_reply(self):
            if self.slow.is_set():
                self.looking.set()
                time.sleep(0.2)  # as long as another thread has the processor
            return super()._has_complete_reply()

    monkeypatch.setattr(supernode, "_CHECK_TOKENS", 0.05)
    loop = FlowerLoop({1: tiny}, state_class=Slow)
    sent = loop.send()
    client = acquire(loop)
    message, context, *_ = run_clientapp.pull_task_input(client)
    loop.state.slow.set()
    assert loop.state.looking.wait(5)
    reply = answer_to(message, x=1)
    threading.Thread(target=run_clientapp.push_message, args=(client, reply, context), daemon=True).start()
    try:
        assert loop.metrics(sent, timeout=2) == {"x": 1}
    finally:
        loop.stop()


def test_finished_tasks_do_not_pile_up(loop):
    for number in range(130):
        sent = loop.send()
        wait_until(lambda sent=sent: sent in loop.fetched)
        client = acquire(loop)
        if number % 3 == 0:
            end(client, SubStatus.FAILED, "no")
        else:
            message, context, *_ = run_clientapp.pull_task_input(client)
            run_clientapp.push_message(client, answer_to(message), context)
            end(client, SubStatus.COMPLETED)
        loop.reply(sent)
    state = loop.state
    wait_until(lambda: not state.msg_store)
    assert len(state.task_store) <= 100
    assert len(state.object_store) == 0 and not state.task_token_store and not state._message_of
    assert not state._object_push_sessions and not state._object_push_session_by_root
    assert len(state.time_store) <= 1


def test_messages_of_a_run_that_could_not_be_fetched_are_forgotten(loop, monkeypatch):
    """The SuperLink is gone in the middle of a message: no answer, no task, and the next one works."""
    monkeypatch.setattr(start_client_internal.time, "sleep", lambda seconds: None)
    first = True

    def pull_objects(object_ids, pull_object_fn, **options):
        nonlocal first
        if first:
            first = False
            raise ConnectionError("the SuperLink is gone")
        return {object_id: pull_object_fn(object_id) for object_id in object_ids}

    monkeypatch.setattr(start_client_internal, "pull_objects", pull_objects)
    lost, sent = loop.send(), loop.send()
    message = None
    while message is None:
        client = acquire(loop)
        with contextlib.suppress(Exception):  # it may be the task of the one that is lost
            message, context, *_ = run_clientapp.pull_task_input(client)
    assert message.metadata.message_id == sent
    run_clientapp.push_message(client, answer_to(message), context)
    end(client, SubStatus.COMPLETED)
    loop.reply(sent)
    assert lost not in loop.replies and not loop.state.msg_store.get(lost)


# Looking for messages -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The time as `supernode` reads it: it passes only where a test lets it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.pass_by = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(supernode, "time", clock)
    return clock


class Looks:
    """Stands for the connection's `receive`: what it gives in turn, then None; and when it was asked."""

    def __init__(self, *gives):
        self.gives = list(gives)
        self.at = []

    def __call__(self):
        self.at.append(supernode.time.monotonic())
        given = self.gives.pop(0) if self.gives else None
        if isinstance(given, BaseException) or (isinstance(given, type) and issubclass(given, BaseException)):
            raise given
        return given


@pytest.fixture
def prompt():
    """(Prompt, what it says)."""
    link, end = Link.pair()
    said = []
    other = Link(end)
    threading.Thread(target=lambda: [said.append(event) for event in other], daemon=True).start()
    yield Prompt(link, poll=0.2), said
    link.close()


def a_message():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return Message(RecordDict(), dst_node_id=NODE, message_type="train", group_id="3")


def receiving(prompt, receive):
    """The `receive` of Flower's main loop, by way of the connection that it comes from."""
    @contextlib.contextmanager
    def connect():
        yield (NODE, receive, "send", "get_run", "get_fab", "pull", "push", lambda run, message: None)

    connected = prompt.around(connect)()
    node, found, *_ = connected.__enter__()
    assert node == NODE
    return found


def test_pauses_grow_to_poll_and_begin_again_after_a_message(prompt, clock, monkeypatch):
    looking, _ = prompt
    monkeypatch.setattr(looking._wake, "wait", clock.pass_by)
    looks = Looks(*[None] * 60, (a_message(), None), None, None, (a_message(), None))
    receive = receiving(looking, looks)
    assert receive()[0].metadata.group_id == "3"
    since, pauses = np.array(looks.at[:-1]) - looks.at[0], np.diff(looks.at)
    assert pauses[0] == pytest.approx(0.02), "the first look after a reply is soon repeated"
    assert all(pauses <= np.maximum(since / 8, 0.02) + 1e-9), "none is seen much later than it came"
    assert max(pauses) == pauses[-1] == pytest.approx(0.2), "pauses grow to `poll`, and not beyond"
    again, replied = len(looks.at), clock.now
    receive()
    assert looks.at[again] - replied == pytest.approx(0.25), "the last wait took longer: it does not look at once"
    assert np.diff(looks.at[again:]) == pytest.approx([0.25 / 8, 0.25 * (1 + 1 / 8) / 8]), "and then soon again"


def test_messages_that_come_in_even_intervals_are_not_looked_for_in_their_first_half(prompt, clock, monkeypatch):
    looking, _ = prompt
    monkeypatch.setattr(looking._wake, "wait", clock.pass_by)
    due, at = 0.0, []

    def look():
        at.append(clock.now)
        return (a_message(), None) if clock.now >= due else None

    receive = receiving(looking, look)
    for number in range(6):
        began, before = clock.now, len(at)
        due = began + 0.3
        receive()
        assert clock.now - due < 0.05, "it is seen soon after it came"
        assert number == 0 or at[before] - began >= 0.15
    assert len(at[before:]) <= 8


def test_a_short_interval_among_long_ones_is_remembered(prompt, clock, monkeypatch):
    """As in rounds with a training that takes long, and an evaluation right after it."""
    looking, _ = prompt
    monkeypatch.setattr(looking._wake, "wait", clock.pass_by)
    due = 0.0
    receive = receiving(looking, lambda: (a_message(), None) if clock.now >= due else None)
    for interval in (60.0, 0.05) * 3:
        due = clock.now + interval
        receive()
    assert clock.now - due < 0.025


def test_who_holds_it_stops_the_looking_and_wakes_it_again(prompt):
    looking, said = prompt
    looks = Looks()
    receive = receiving(looking, looks)
    got = []
    thread = threading.Thread(target=lambda: got.append(receive()), daemon=True)
    thread.start()
    wait_until(lambda: looks.at)
    looking.hold(True)
    wait_until(lambda: said and said[-1] == {"event": "idle", "held": True})
    before = len(looks.at)
    time.sleep(0.5)
    assert len(looks.at) == before
    looks.gives = [(a_message(), None)]
    looking.hold(False)
    thread.join(1)
    assert got and said[-1]["event"] in ("busy", "idle")
    wait_until(lambda: said[-1] == {"event": "busy", "run": 1, "type": "train", "round": "3"})


def test_a_held_one_takes_nothing_when_it_comes_back_from_a_message(prompt):
    looking, said = prompt
    looking.hold(True)
    looks = Looks((a_message(), None))
    thread = threading.Thread(target=receiving(looking, looks), daemon=True)
    thread.start()
    wait_until(lambda: {"event": "idle", "held": True} in said)
    time.sleep(0.1)
    assert looks.at == []
    looking.hold(False)
    thread.join(2)
    assert looks.at


def test_a_run_that_was_stopped_does_not_end_it(prompt):
    looking, _ = prompt
    looks = Looks(RunNotRunningException, RunNotRunningException, (a_message(), None))
    assert receiving(looking, looks)()[0].metadata.message_type == "train"


def test_the_parent_hears_who_this_node_is_and_when_a_message_was_fetched(prompt):
    looking, said = prompt
    confirmed = []

    @contextlib.contextmanager
    def connect():
        yield (NODE, *[None] * 6, lambda run, message: confirmed.append((run, message)))

    with looking.around(connect)() as (*_, confirm):
        confirm(1, "id")
    wait_until(lambda: [event["event"] for event in said] == ["connected", "fetched"])
    assert said[0]["node"] == NODE and confirmed == [(1, "id")]


def test_an_object_that_the_superlink_has_stored_is_not_refused_when_it_is_sent_again(prompt):
    """As after an acknowledgement that was lost; Flower's main loop would give the whole reply up."""
    looking, _ = prompt
    there = {}

    def pull(run, object_id):
        return there[run, object_id]

    def push(run, session, object_id, content):
        if (run, object_id) in there:
            raise ObjectPushError(object_id, run, session)
        there[run, object_id] = content

    @contextlib.contextmanager
    def connect():
        yield (NODE, None, "send", "get_run", "get_fab", pull, push, None)

    with looking.around(connect)() as (node, _, *others, pulling, pushing, _):
        assert (node, others, pulling) == (NODE, ["send", "get_run", "get_fab"], pull)
        for _ in range(2):
            pushing(1, "session", "id", b"content")
        with pytest.raises(ObjectPushError):
            pushing(1, "session", "id", b"other")
    assert there == {(1, "id"): b"content"}


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "details", "words"),
    [
        ("UNAUTHENTICATED", "Invalid timestamp", ["does not accept the time of this machine", "UTC", "NTP"]),
        ("", "[code: 2004] Public key is unknown", ["does not know this node's key", "tepal provision register"]),
        ("", "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", ["no TLS connection", "ca.crt"]),
        ("", "CERTIFICATE_VERIFY_FAILED: certificate has expired", ["not valid at this machine's time", "UTC", "NTP"]),
        ("", "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", ["not valid at this machine's time", "renews"]),
        ("UNAUTHENTICATED", "something new", ["refuses this node", "UNAUTHENTICATED something new"]),
    ],
)
def test_a_refusal_says_what_to_do(code, details, words):
    said = explain_refusal(code, details)
    assert all(word in said for word in words), said


def test_a_port_number_in_an_error_is_no_unknown_key():
    said = explain_refusal("", "Failed to initialize the connection.\nfailed to connect to 10.0.0.1:20041")
    assert "key" not in said


def test_a_node_that_was_killed_is_not_only_told_that_its_key_is_unknown():
    """The SuperLink takes it for connected until it has missed its heartbeats, and refuses its key as long."""
    assert "minute" in explain_refusal("", "[code: 2004] Node activation failed")


def test_the_state_is_made_once():
    link, end = Link.pair()
    factory = PromptStateFactory(ObjectStoreFactory(), link)
    assert factory.state() is factory.state()
    assert isinstance(factory.state(), PromptState)
    link.close()
    end.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 1), (RuntimeError("Heartbeat sender is not running."), 1), (SystemExit(0), 0), (SystemExit("no"), 1)],
)
def test_a_main_loop_that_has_ended_does_not_leave_a_process_that_does_nothing(monkeypatch, error, code):
    """As after a SuperLink that does not know the node any more; the parent starts another one."""

    def ends():
        if error:
            raise error

    left = []
    link, end = Link.pair()
    monkeypatch.setattr(supernode.sys, "argv", ["", "3", "1.0", "runtime"])
    monkeypatch.setattr(supernode.Link, "inherited", staticmethod(lambda number: link))
    for name in ("die_with_parent", "change_flower", "_listen"):
        monkeypatch.setattr(supernode, name, lambda *_: None)
    monkeypatch.setattr(supernode.signal, "signal", lambda *_: None)
    monkeypatch.setattr(supernode.logging, "shutdown", lambda: None)
    monkeypatch.setattr(supernode, "flower_supernode", ends)
    monkeypatch.setattr(supernode.os, "_exit", left.append)
    supernode.main()
    assert left == [code]
    link.close()
    end.close()


@pytest.mark.parametrize("at", ["the message's objects", "the word that it is there"])
def test_a_run_that_is_stopped_while_its_message_comes_leaves_nothing_behind(loop, monkeypatch, at):
    """Its task, too, would stay, and the process that has taken it would wait for the message."""
    taken, stopped = threading.Event(), threading.Event()

    def is_stopped(*_):
        assert taken.wait(10)
        stopped.set()
        raise RunNotRunningException

    pull = functools.partial(supernode.pull_while_it_comes, quick(pull_objects))
    monkeypatch.setattr(start_client_internal, "pull_objects", pull)
    with monkeypatch.context() as only_now:
        if at == "the message's objects":
            only_now.setattr(loop, "may_fetch", SimpleNamespace(wait=is_stopped))
        else:
            link, other = Link.pair()
            connect = contextlib.contextmanager(lambda: (yield (NODE, *[None] * 6, is_stopped)))
            with Prompt(link, poll=0.2).around(connect)() as (*_, confirm):
                only_now.setattr(loop, "fetched", SimpleNamespace(add=lambda message: confirm(1, message)))
            link.close()
            other.close()
        loop.send()
        client = acquire(loop)
        taken.set()
        wait_until(lambda: stopped.is_set() and not loop.state.msg_store and not len(loop.state.object_store))
    with pytest.raises(Unknown):
        run_clientapp.pull_task_input(client)
    sent = loop.send(run=2)
    client = acquire(loop)
    message, context, run, _ = run_clientapp.pull_task_input(client)
    assert run.run_id == 2
    run_clientapp.push_message(client, answer_to(message, x=7), context)
    end(client, SubStatus.COMPLETED)
    assert loop.metrics(sent) == {"x": 7}


# A sender that dies while it sends ------------------------------------------------------------------------------------


def test_a_message_whose_sender_died_is_given_up_when_nothing_more_comes(clock, monkeypatch):
    monkeypatch.setattr(supernode, "_STALLED", 0.5)
    asked = []

    def pull_one(object_id):
        asked.append(object_id)
        if object_id == "never":
            clock.pass_by(0.2)
            raise ObjectUnavailableError(object_id)
        return b"here"

    with pytest.raises(ObjectPullError, match=r"no object of its message has arrived for 0\.5 s"):
        supernode.pull_while_it_comes(quick(pull_objects), ["here", "never"], pull_one, max_concurrent_pulls=1)
    assert asked == ["here", "never", "never", "never"]


def test_a_message_that_comes_slowly_is_waited_for(clock, monkeypatch):
    monkeypatch.setattr(supernode, "_STALLED", 0.5)
    asked = []

    def pull_one(object_id):
        asked.append(object_id)
        if asked.count(object_id) < 3:
            clock.pass_by(0.2)
            raise ObjectUnavailableError(object_id)
        return object_id.encode()

    ids = ["1", "2", "3", "4"]
    pulled = supernode.pull_while_it_comes(quick(pull_objects), ids, pull_one, max_concurrent_pulls=1)
    assert pulled == {each: each.encode() for each in ids} and clock.now == pytest.approx(1.6)


def test_the_parent_hears_about_every_five_seconds_that_the_superlink_still_answers(prompt, clock, monkeypatch):
    looking, said = prompt
    monkeypatch.setattr(looking._wake, "wait", clock.pass_by)
    receiving(looking, Looks(*[None] * 200, (a_message(), None)))()
    wait_until(lambda: said and said[-1]["event"] == "busy")
    heard = [event["event"] for event in said].count("looked")
    assert clock.now / 7 < heard < clock.now / 4 and clock.now > 20


def test_a_refusal_is_told_to_the_parent_and_then_as_flower_has_it():
    link, end = Link.pair()
    left = []
    leave = lambda code, message, **more: left.append((code, message, more))  # noqa: E731
    report_refusal(link, leave, 3, "not known", event=1)
    link.close()
    assert left == [(3, "not known", {"event": 1})]
    assert [event["event"] for event in Link(end)] == ["refused"]
