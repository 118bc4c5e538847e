"""Makes the connector known to vLLM by its name. Imports vLLM only when vLLM asks for it.

vLLM calls `register` in each of its processes, by the entry point ``kvferry`` of the group ``vllm.general_plugins``
(vllm/plugins/__init__.py, `load_general_plugins`; 0.32.0). Where ``VLLM_PLUGINS`` is set, it must name ``kvferry``.
"""

from __future__ import annotations

import logging
from contextlib import suppress

logger = logging.getLogger(__name__)

CONNECTOR = "KvferryConnector"
"""The connector's name for vLLM. It must be the name of its class: MultiConnector finds the counts of its children by
the names of their classes."""


def register() -> None:
    """Register the connector with vLLM's factory, so that ``kv_connector`` alone names it, and let kvferry's lines go
    where vLLM's go. Idempotent."""
    _log_as_vllm()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        # vLLM does not catch errors of plugins: it would not start, also for those who do not use this connector.
        logger.warning("%s is not available in this version of vLLM: %s", CONNECTOR, error)
        return
    # ValueError: it is registered in this process already.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "kvferry.integrations.vllm", CONNECTOR)


class _VllmsHandlers(logging.Handler):
    """Shows lines as vLLM shows its own of that moment: vLLM configures its logger after it has loaded plug-ins, and
    may do so again."""

    def emit(self, record: logging.LogRecord) -> None:
        vllms = logging.getLogger("vllm")
        if vllms.isEnabledFor(record.levelno):
            vllms.handle(record)


def _log_as_vllm() -> None:
    """Treat kvferry's lines as vLLM treats its own: with its level, and with time, level and process. vLLM configures
    its own logger alone, and Python shows what no handler takes as bare text, from warnings on.

    Nothing is changed where the application has configured the logger ``kvferry``; if it does so later, as a file of
    `VLLM_LOGGING_CONFIG_PATH` may, that replaces this handler.
    """
    ours = logging.getLogger("kvferry")
    if ours.handlers:
        return
    ours.addHandler(_VllmsHandlers())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        # vLLM's level decides, which is not known yet.
        ours.setLevel(logging.DEBUG)
