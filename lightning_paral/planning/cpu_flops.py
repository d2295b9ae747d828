"""Count the operations of CPU kernels that torch's `FlopCounterMode` does not know: attention and LSTMs."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]


def register_cpu_kernels() -> None:
    """Register the formulas with torch's registry, for the rest of the process."""
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        aten.mkldnn_rnn_layer: lstm_flops,
        aten.mkldnn_rnn_layer_backward: lstm_backward_flops,
    }
    for kernel, formula in formulas.items():
        if kernel not in flop_registry:
            register_flop_formula(kernel)(formula)


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the operations of the scores, and of their product with the values. Masks skip none.

    Args:
        query: the shape (batch, heads, queries, width).
        key: the shape (batch, heads, keys, width); it may have fewer heads.
        value: the shape (batch, heads, keys, width of values).
    """
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def attention_backward_flops(_gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the operations of the scores again, and of the gradients of scores, queries, keys and values.

    The shapes are those of `attention_flops`.
    """
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def lstm_flops(inputs: Shape, weight: Shape, recurrent_weight: Shape, *_: Any, **__: Any) -> int:
    """Return the operations of one layer in one direction.

    Args:
        inputs: the shape (steps, batch, features).
        weight: the shape (4 hidden, features).
        recurrent_weight: the shape (4 hidden, hidden).
    """
    return 2 * prod(inputs[:2]) * (prod(weight) + prod(recurrent_weight))


def lstm_backward_flops(*shapes: Any, **others: Any) -> int:
    """Return the operations of the gradients of inputs and weights. The shapes are those of `lstm_flops`."""
    return 2 * lstm_flops(*shapes, **others)
