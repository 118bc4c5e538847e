"""Loggers whose handlers and filters, the application's, may raise anything where kvferry must go on."""

from __future__ import annotations

import logging
import threading
from typing import Any


class Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no `LoggerAdapter[...]`.
    """Logs under a name. Whatever a handler or a filter raises is dropped, since there is nowhere to log it, but on the
    main thread `KeyboardInterrupt` and `SystemExit` are raised, as by `kvferry._threads.guarded`."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), None)

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        try:
            # The record names the caller, and not this method.
            self.logger.log(level, msg, *args, stacklevel=2, **options)
        except BaseException as error:
            mine = isinstance(error, (KeyboardInterrupt, SystemExit))
            if mine and threading.current_thread() is threading.main_thread():
                raise
