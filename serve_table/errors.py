"""Every exception Rutter raises on purpose.

    RutterError
    ├── ConfigError          a flag, file or parameter that the user gave
    ├── ArtifactError        an artifact that cannot be used
    ├── JournalError         a journal that cannot be read or written
    ├── TraceError           a workload trace that cannot be used
    ├── SearchError          a search that cannot give a result
    ├── ClusterError         a cluster that cannot be started, reached or stopped
    ├── RequestError         a client's request that the router itself refuses
    ├── RunError             a run folder that cannot be used
    ├── KvEventError         KV events of an engine that cannot be followed
    └── EngineError          one exchange with one engine failed
        ├── EngineUnreachableError    nothing was sent: another engine may be tried
        ├── EngineTimeoutError        no answer within the limit
        └── EngineProtocolError  the answer broke off or is not HTTP

The message of each is one line for a person: what, where, and what to do.
"""


class RutterError(Exception):
    """Base of all errors with a message meant for the user."""


class ConfigError(RutterError):
    """A flag, configuration file or parameter cannot be used."""


class ArtifactError(RutterError):
    """An artifact is malformed, from another format, or does not fit."""


class JournalError(RutterError):
    """A journal cannot be read or written."""


class TraceError(RutterError):
    """A workload trace cannot be used."""


class SearchError(RutterError):
    """A search ended without a usable result."""


class ClusterError(RutterError):
    """A cluster cannot be started, reached or stopped."""


class RunError(RutterError):
    """A run folder is in use, damaged or incomplete."""


class KvEventError(RutterError):
    """An engine's KV events cannot be read, or are of a cache that we do not understand."""


class RequestError(RutterError):
    """The router itself answers a client's request, with this HTTP status and these headers."""

    def __init__(self, status: int, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class EngineError(RutterError):
    """One exchange with one engine failed."""


class EngineUnreachableError(EngineError):
    """The engine could not be connected to; no byte of the request was sent."""


class EngineTimeoutError(EngineError):
    """The engine did not answer within the limit."""


class EngineProtocolError(EngineError):
    """The engine's answer broke off or is not HTTP."""
