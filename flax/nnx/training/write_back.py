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
"""Values that replace those of Variables: typed, laid out and put in place."""
from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax.core import spmd as core_spmd
from flax.core.meta import get_global_mesh
from flax.nnx import graphlib, variablelib


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, variablelib.Variable)


def strongly_typed(x: tp.Any, like: tp.Any = None) -> tp.Any:
  """``x`` without weak type, so that it keeps its type through updates.

  Args:
    x: an array or Python number; other leaves are returned as they are.
    like: the value that ``x`` replaces, whose dtype a weakly typed ``x`` takes.
  """
  if not isinstance(x, jax.Array | bool | int | float | complex):
    return x
  if isinstance(x, jax.Array) and not getattr(
    jax.typeof(x), 'weak_type', False
  ):
    return x
  has_dtype = isinstance(like, jax.Array)
  return jnp.asarray(x, dtype=like.dtype if has_dtype else jnp.result_type(x))


def unshared(tree: tp.Any, apart_from: tp.Any, *, buffers: bool) -> tp.Any:
  """Copies arrays of ``tree`` so that no two of them are the same.

  Args:
    tree: pytree of arrays, to be donated later.
    apart_from: pytree of arrays that will be donated along with it.
    buffers: whether to compare buffers too, which waits for their values, or
      only the array objects.
  """
  taken: set[tp.Any] = set()
  alive: list[tp.Any] = []  # an id is unique only while its array lives

  def take(x):
    if not isinstance(x, jax.Array):
      return x
    keys = _buffers(x) if buffers else {id(x)}
    if not taken.isdisjoint(keys):
      x = jnp.copy(x)
      keys = _buffers(x) if buffers else {id(x)}
    taken.update(keys)
    alive.append(x)
    return x

  for leaf in jax.tree.leaves(apart_from):
    if isinstance(leaf, jax.Array):
      taken.update(_buffers(leaf) if buffers else {id(leaf)})
  return jax.tree.map(take, tree)


def _buffers(x: jax.Array) -> set[tp.Any]:
  try:
    return {
      (shard.device, shard.data.unsafe_buffer_pointer())
      for shard in x.addressable_shards
      if shard.data.size
    }
  except Exception:  # a tracer, a typed key, a backend without pointers
    return {id(x)}


def _declared_sharding(
  metadata: dict[str, tp.Any],
) -> NamedSharding | None:
  """The sharding that metadata asks for, if it can be had in this context."""
  spec = metadata.get('out_sharding') or PartitionSpec()
  if not isinstance(spec, tuple | PartitionSpec):
    return spec if isinstance(spec, NamedSharding) else None
  spec = core_spmd.apply_rules(spec, metadata.get('sharding_rules'))
  mesh = metadata.get('mesh') or get_global_mesh()
  if mesh is None or mesh.empty:
    return None
  if any(kind != AxisType.Auto for kind in mesh.axis_types):
    return None
  for axes in spec:
    for axis in axes if isinstance(axes, tuple) else (axes,):
      if isinstance(axis, str) and axis not in mesh.axis_names:
        return None
  return NamedSharding(mesh, spec)


def _keep_sharding(
  new: tp.Any, old: tp.Any, metadata: dict[str, tp.Any] | None
) -> tp.Any:
  if not (isinstance(new, jax.Array) and isinstance(old, jax.Array)):
    return new
  if new.shape != old.shape:
    return new
  if not any(isinstance(x, jax.core.Tracer) for x in (new, old)):
    if new.sharding.is_equivalent_to(old.sharding, new.ndim):
      return new
    return jax.device_put(new, old.sharding)
  old_sharding = jax.typeof(old).sharding
  if jax.typeof(new).sharding.spec != old_sharding.spec:  # Explicit axes
    return jax.sharding.reshard(new, old_sharding)
  # Under jit, Auto axes leave no trace of how ``old`` is laid out.
  sharding = None if metadata is None else _declared_sharding(metadata)
  if sharding is not None:
    return jax.lax.with_sharding_constraint(new, sharding)
  return new


def settle(new: tp.Any, variables: tp.Any, declared_by: str) -> tp.Any:
  """Values about to replace those of ``variables``, typed and laid out alike.

  Args:
    new: pure tree of the structure of ``variables``; a tree of another
      structure is returned as it is.
    variables: the Variables (or arrays) to be updated.
    declared_by: metadata key; where a Variable has it, its metadata tells the
      sharding that a traced value cannot tell.
  """
  holders, treedef = jax.tree.flatten(variables, is_leaf=_is_variable)
  try:
    values = treedef.flatten_up_to(new)
  except ValueError:
    return new

  def settle_one(holder, value):
    old = graphlib.as_pure(holder)
    if jax.tree.structure(old) != jax.tree.structure(value):
      return value
    metadata = holder.get_metadata() if _is_variable(holder) else {}
    declared = metadata if metadata.get(declared_by) else None
    return jax.tree.map(
      lambda n, o: _keep_sharding(strongly_typed(n, o), o, declared), value, old
    )

  return treedef.unflatten(map(settle_one, holders, values))


def write(node: tp.Any, variables: tp.Any, new: tp.Any) -> None:
  """Puts values into Variables, one by one, whatever pytrees they hold.

  Args:
    node: what the Variables belong to.
    variables: tree of the Variables (and bare arrays) of ``node`` to update.
    new: pure tree of the same structure. A tree of another structure updates
      ``node`` by path, as :func:`~flax.nnx.update` does.
  """
  holders, treedef = jax.tree.flatten(variables, is_leaf=_is_variable)
  try:
    values = treedef.flatten_up_to(new)
  except ValueError:
    graphlib.update(node, graphlib.state(new))
    return
  leaves = []
  for holder, value in zip(holders, values):
    if _is_variable(holder):
      graphlib.update(holder, value)
    leaves.append(holder if _is_variable(holder) else value)
  if not all(map(_is_variable, leaves)):  # bare arrays are found by path
    graphlib.update(node, treedef.unflatten(leaves))
