"""Loggers whose handlers and filters may raise anything: they are the application's, and are called in the middle of
what must not end there, such as the end of a read."""

from __future__ import annotations

import logging
import threading


class Log:
    """Logs under a name, with methods of `logging.Logger`. Whatever a handler or a filter raises is dropped, since
    there is nowhere to log it.

    On the main thread `KeyboardInterrupt` and `SystemExit` are raised, as by `kvferry._threads.guarded`.
    """

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def isEnabledFor(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def debug(self, message: str, *given: object, exc_info: BaseException | bool | None = None) -> None:
        self._log(logging.DEBUG, message, given, exc_info)

    def info(self, message: str, *given: object) -> None:
        self._log(logging.INFO, message, given)

    def warning(self, message: str, *given: object) -> None:
        self._log(logging.WARNING, message, given)

    def error(self, message: str, *given: object, exc_info: BaseException | bool | None = None) -> None:
        self._log(logging.ERROR, message, given, exc_info)

    def exception(self, message: str, *given: object) -> None:
        self._log(logging.ERROR, message, given, True)

    def critical(self, message: str, *given: object, exc_info: BaseException | bool | None = None) -> None:
        self._log(logging.CRITICAL, message, given, exc_info)

    def log(self, level: int, message: str, *given: object) -> None:
        self._log(level, message, given)

    def _log(
        self, level: int, message: str, given: tuple[object, ...], exc_info: BaseException | bool | None = None
    ) -> None:
        try:
            # The record names the caller's caller.
            self._logger.log(level, message, *given, exc_info=exc_info, stacklevel=3)
        except BaseException as error:
            mine = isinstance(error, (KeyboardInterrupt, SystemExit))
            if mine and threading.current_thread() is threading.main_thread():
                raise
