"""Digests of tensors' bits, where they are, in each backend's own operations; an inside of ``hvdkit.keras``.

Each function gives one int64 for each tensor: the same bits, the same digest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.steps import agreement

_CHUNK_ON_A_GPU = 2**20  # words; few kernels count more than the cache there


def of_tensorflow(tensors: Sequence[Any]) -> agreement.Digests:
    """Digests of TensorFlow's tensors, int64 (len(tensors),): in a CPU's memory NumPy's, faster there."""
    if any("GPU" in tensor.device for tensor in tensors):
        return of_tensorflow_on_a_device(tensors)
    return agreement.array_digests(tensor.numpy() for tensor in tensors)


def of_tensorflow_on_a_device(tensors: Sequence[Any]) -> agreement.Digests:
    """The same digests by TensorFlow's operations, fetched together."""
    import tensorflow as tf

    kinds = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}

    def words(tensor: Any) -> Any:
        tensor = tf.cast(tensor, tf.int8) if tensor.dtype == tf.bool else tensor
        size = tensor.dtype.size
        if size > 8 or int(tf.size(tensor)) * size % 8:
            return tf.reshape(tf.bitcast(tensor, kinds[min(size, 8)]), [-1])
        return tf.bitcast(tf.reshape(tensor, [-1] if size == 8 else [-1, 8 // size]), tf.int64)

    def shift(words: Any, distance: int) -> Any:
        return tf.bitcast(tf.bitwise.right_shift(tf.bitcast(words, tf.uint64), distance), tf.int64)

    def digest(tensor: Any) -> Any:
        flat, chunk = words(tensor), _CHUNK_ON_A_GPU if "GPU" in tensor.device else agreement.CHUNK
        salts = _tensorflow_salts(chunk)
        parts = (tf.cast(flat[start : start + chunk], tf.int64) for start in range(0, len(flat), chunk))
        sums = (tf.reduce_sum(agreement.salted(part, salts[: len(part)], shift)) for part in parts)
        return tf.convert_to_tensor(agreement.join_chunks(sums), tf.int64)

    digests = [digest(tensor) for tensor in tensors]
    return np.array(tf.stack(digests).numpy() if digests else [], dtype=np.int64)


@functools.cache
def _tensorflow_salts(count: int) -> Any:
    import tensorflow as tf

    return tf.constant(agreement.salts(count))


def of_torch(tensors: Sequence[Any]) -> agreement.Digests:
    """Digests of PyTorch's tensors, int64 (len(tensors),), fetched together from each device."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def words(tensor: Any) -> Any:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = real.contiguous().reshape(-1)
        size = flat.element_size()
        if not len(flat) or len(flat) * size % 8:
            return flat.view(kinds[size])
        return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)

    def digest(tensor: Any) -> Any:
        chunk = agreement.CHUNK if tensor.device.type == "cpu" else _CHUNK_ON_A_GPU
        salts = _torch_salts(chunk, tensor.device)
        sums = (agreement.salted(part.long(), salts[: len(part)]).sum() for part in words(tensor).split(chunk))
        return torch.as_tensor(agreement.join_chunks(sums), device=tensor.device)

    digests = [digest(tensor) for tensor in tensors]
    result = np.zeros(len(tensors), dtype=np.int64)
    for device in {tensor.device for tensor in tensors}:
        positions = [position for position, tensor in enumerate(tensors) if tensor.device == device]
        result[positions] = torch.stack([digests[position] for position in positions]).cpu().numpy()
    return result


@functools.cache
def _torch_salts(count: int, device: Any) -> Any:
    import torch

    return torch.from_numpy(agreement.salts(count)).to(device)
