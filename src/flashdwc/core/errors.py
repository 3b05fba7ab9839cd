"""Exceptions and warnings. Bad arguments raise the built-in ``TypeError`` and ``ValueError``."""


class UnsupportedError(RuntimeError):
    """The requested implementation does not cover this call; the message says why."""


class CompileError(RuntimeError):
    """A kernel did not compile; the message holds the compiler's log and the path of the source."""


class LaunchError(RuntimeError):
    """The driver refused to load or to launch a kernel."""


class CaptureError(RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured."""


class SettingError(ValueError):
    """An environment variable holds what it may not."""


class CacheWarning(UserWarning):
    """The kernel cache on disk is unusable; kernels are kept in memory only."""
