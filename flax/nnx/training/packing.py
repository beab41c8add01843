# Copyright 2026 The Flax Authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Arguments and results of a compiled step: arrays, Modules, and constants.

``jax.jit`` takes and returns arrays. Modules are handed over apart from the
other arguments, and constants out of sight of the tracer.
"""
from __future__ import annotations

import typing as tp

import jax
import numpy as np

from flax.nnx import variablelib
from flax.nnx.pytreelib import Pytree
from flax.nnx.training.captures import is_constant, key_of
from flax.nnx.training.snapshot import is_stateful


class NotCompiled(Exception):
  """This call has to run as it is."""


@jax.tree_util.register_static
class Constant:
  """A value that stays out of tracing, with the key that identifies it."""

  def __init__(self, value: tp.Any, key: tp.Hashable):
    self.value = value
    self.key = key

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Constant) and self.key == other.key

  def __hash__(self) -> int:
    return hash(self.key)


class Index(tp.NamedTuple):
  """Place of a Module among those that were taken out of the arguments."""

  index: int


def is_array(x: tp.Any) -> bool:
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def pack(result: tp.Any) -> tp.Any:
  """Takes what is no array out of an output of ``jax.jit``."""

  def pack_leaf(x):
    if is_array(x):
      return x
    if not is_constant(x):
      raise NotCompiled  # a new object at each call, maybe one of tracers
    return Constant(x, (type(x), x))

  return jax.tree.map(pack_leaf, result, is_leaf=is_stateful)


def unpack(result: tp.Any) -> tp.Any:
  """Undoes :func:`pack`."""
  is_packed = lambda x: isinstance(x, Constant)
  return jax.tree.map(
    lambda x: x.value if is_packed(x) else x, result, is_leaf=is_packed
  )


def take_apart(args: tp.Any) -> tuple[tp.Any, list[tp.Any], tp.Any]:
  """Modules, and leaves and structure of what else there is."""
  leaves, treedef = jax.tree.flatten(
    args, is_leaf=lambda x: x is None or is_stateful(x)
  )
  nodes: list[tp.Any] = []

  def take(leaf):
    if isinstance(leaf, (Pytree, variablelib.Variable)):
      nodes.append(leaf)
      index = Index(len(nodes) - 1)
      return Constant(index, index)
    return leaf if is_array(leaf) else Constant(leaf, key_of(leaf))

  taken = [take(leaf) for leaf in leaves]
  return tuple(nodes), taken, treedef


def put_together(nodes: tp.Any, leaves: list[tp.Any], treedef: tp.Any):
  """Undoes :func:`take_apart`, around Modules that may be other ones."""
  return treedef.unflatten(
    nodes[leaf.index] if isinstance(leaf, Index) else leaf
    for leaf in unpack(leaves)
  )
