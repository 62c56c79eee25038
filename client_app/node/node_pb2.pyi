from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undo",)
    UNDO_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    def __init__(self, undo: bool = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("state", "problem", "name", "superlink", "node_id", "uptime_seconds", "run_id", "message_type", "round", "message_seconds", "answered", "failed", "executors_died", "supernodes_died", "processes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUPERLINK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_DIED_FIELD_NUMBER: _ClassVar[int]
    SUPERNODES_DIED_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    state: str
    problem: str
    name: str
    superlink: str
    node_id: int
    uptime_seconds: float
    run_id: int
    message_type: str
    round: str
    message_seconds: float
    answered: int
    failed: int
    executors_died: int
    supernodes_died: int
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, state: _Optional[str] = ..., problem: _Optional[str] = ..., name: _Optional[str] = ..., superlink: _Optional[str] = ..., node_id: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., run_id: _Optional[int] = ..., message_type: _Optional[str] = ..., round: _Optional[str] = ..., message_seconds: _Optional[float] = ..., answered: _Optional[int] = ..., failed: _Optional[int] = ..., executors_died: _Optional[int] = ..., supernodes_died: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("role", "pid", "resident_bytes", "run_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    resident_bytes: int
    run_id: int
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., run_id: _Optional[int] = ...) -> None: ...
