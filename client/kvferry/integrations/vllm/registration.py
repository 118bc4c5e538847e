"""Makes the connector known to vLLM by its name. Imports vLLM only when vLLM calls.

vLLM calls `register` in each of its processes, by the entry point ``kvferry`` of the group ``vllm.general_plugins``
(vllm/plugins/__init__.py, `load_general_plugins`; 0.32.0). If ``VLLM_PLUGINS`` is set, it must name ``kvferry``.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

logger = logging.getLogger(__name__)

CONNECTOR = "KvferryConnector"
"""The connector's name for vLLM, and that of its class, by which MultiConnector finds its children's counts."""


def register() -> None:
    """Register the connector with vLLM's factory, so that ``kv_connector`` alone names it, and with Dynamo where Dynamo
    runs vLLM; send kvferry's log lines to vLLM's handlers. Idempotent."""
    _log_as_vllm()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        # vLLM does not catch errors of plugins: it would not start, even without this connector.
        logger.warning("%s is not available in this version of vLLM: %s", CONNECTOR, error)
        return
    # ValueError: the connector is registered in this process already.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "kvferry.integrations.vllm", CONNECTOR)
    _register_with_dynamo()


def _register_with_dynamo() -> None:
    """Tell Dynamo that requests are handed over as NixlConnector's are: prefill is asked with ``do_remote_decode``, and
    decode gets the ``kv_transfer_params`` of prefill's answer unchanged.

    Dynamo fails the requests of connectors that its table lacks (dynamo/vllm/kv_connector_protocols.py,
    `make_kv_connector_protocol`; ai-dynamo 1.6.1). If Dynamo's own table has kvferry one day, its entry stays.
    """
    # Dynamo's workers are modules of this package, and load vLLM's plug-ins when they parse their arguments. Where the
    # package is not loaded, no worker runs, and nothing else that is called "dynamo" is imported.
    if "dynamo.vllm" not in sys.modules:
        return
    try:
        from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS

        KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR, KV_CONNECTOR_PROTOCOLS["NixlConnector"])
    except Exception as error:
        # An error of any kind would end Dynamo's worker, even one without this connector.
        logger.warning("%s is not available in this version of Dynamo: %r", CONNECTOR, error)


class _VllmsHandlers(logging.Handler):
    """Passes lines to the present handlers of vLLM's logger: vLLM configures its logger after it has loaded plug-ins,
    and may do so again."""

    def emit(self, record: logging.LogRecord) -> None:
        vllms = logging.getLogger("vllm")
        if vllms.isEnabledFor(record.levelno):
            vllms.handle(record)


def _log_as_vllm() -> None:
    """Log kvferry's lines like vLLM's own: with its level, and with time, level and process. vLLM configures only its
    own logger, and without a handler Python shows lines as bare text, from warnings on.

    A logger ``kvferry`` that the application has configured stays unchanged; a later configuration, such as a file of
    `VLLM_LOGGING_CONFIG_PATH`, replaces this handler.
    """
    ours = logging.getLogger("kvferry")
    if ours.handlers:
        return
    ours.addHandler(_VllmsHandlers())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        # vLLM's level decides, which is not known yet.
        ours.setLevel(logging.DEBUG)
