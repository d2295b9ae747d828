"""Offload of one run: what has to be there before it, what it compiles and claims."""

from lightning_paral.engines.zero.config.options import ZeROOptions
from lightning_paral.engines.zero.offload import nvme
from lightning_paral.engines.zero.offload.operators import check_compiler, load_operator


def check_offload(options: ZeROOptions) -> None:
    """Raise a `ConfigurationError` if this host lacks a compiler, a library or a folder that `options` ask for."""
    if options.offload_optimizer is not None:
        check_compiler("offload_optimizer", needs_aio=False)
    for option, offload in options.on_nvme.items():
        check_compiler(option, needs_aio=True)
        assert offload.path is not None
        nvme.check_folder(offload.path)


def load_async_io(options: ZeROOptions) -> None:
    """Load what reads and writes NVMe, compiling it first where this host has not yet, if `options` need it.

    To be called after all checks: it may take minutes.

    Raises:
        ConfigurationError: it does not compile.
    """
    for option in options.on_nvme:
        load_operator("async_io", option)


def check_space(options: ZeROOptions, num_elements: int) -> None:
    """Raise a `ConfigurationError` if the ranks of this host are about to write more than the disk has free.

    Args:
        options: what is offloaded.
        num_elements: elements of all parameters trained, those that the ranks of this host keep.
    """
    for option, offload in options.on_nvme.items():
        # fp32 parameters, gradients and two moments; parameters as they are computed with.
        assert offload.path is not None
        nvme.check_space(offload.path, num_elements * (16 if option == "offload_optimizer" else 4))
