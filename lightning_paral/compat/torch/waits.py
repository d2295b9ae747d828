"""Private functions of torch in which a rank waits for other ranks, by the name that a stack shows."""

from lightning_paral.compat.private_name import PrivateName

BACKWARD = "_engine_run_backward"
"""The function in `torch/autograd/graph.py` that runs the backward pass."""
OF_DDP = {
    "_verify_param_shape_across_processes": "in DDP's comparison of the parameters",
    "_sync_module_states": "in DDP's broadcast of the module",
}
"""The functions in `torch/distributed/utils.py` that DDP's constructor calls, and what a rank does there."""

NAMES = (
    PrivateName(
        name=f"torch.autograd.graph.{BACKWARD}",
        purpose="to say that a rank waits in the backward pass",
        reason="DDP waits for gradients in C++, so the stack has no public function of a collective",
        seen="torch 2.11 to 2.13",
    ),
    *(
        PrivateName(
            name=f"torch.distributed.utils.{name}",
            purpose="to say that a rank waits in the constructor of DDP",
            reason="DDP waits there in C++, so the stack has no public function of a collective",
            seen="torch 2.11 to 2.13",
        )
        for name in OF_DDP
    ),
)
