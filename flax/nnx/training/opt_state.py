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
"""The optimizer state: its Variables, and how they start.

Optax starts some states weakly typed (a second compilation), with one buffer in
two leaves (no donation), and knows nothing of sharding metadata.
"""
from __future__ import annotations

import typing as tp

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from flax.nnx import graphlib, variablelib
from flax.nnx.training.write_back import strongly_typed, unshared

# Metadata key under which a parameter's shape travels through ``tx.init``.
PARAM_SHAPE = 'optimized_param_shape'


class OptState(variablelib.Variable):
  """A Variable of the optimizer rather than of the model.

  As a filter it selects all state of optimizers.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    >>> state = nnx.state((model, optimizer), nnx.training.optimizer.OptState)
    >>> sorted({path[-1] for path, _ in nnx.to_flat_state(state)})
    ['bias', 'count', 'kernel', 'step']
  """


class OptArray(OptState):
  """Optimizer state that stems from no parameter, such as a step count.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    >>> type(optimizer.opt_state[0].count).__name__
    'OptArray'
  """


class OptVariable(OptState):
  """Optimizer state that stems from a parameter and keeps its metadata.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    >>> momentum = optimizer.opt_state[0].mu['kernel']
    >>> type(momentum).__name__, momentum.shape
    ('OptVariable', (2, 3))
  """


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, variablelib.Variable)


def tag_params(variables: tp.Any) -> tp.Any:
  """Parameters as ``tx.init`` gets them: each one knows its own shape.

  Optax copies metadata along with values; the shape tells ``state_metadata``
  which state leaves are shaped like the parameter. Variables that hold refs
  hold the values instead, since optax computes with them.
  """

  def tag(x):
    value = graphlib.as_pure(x)
    if not _is_variable(x):
      return value
    shape = getattr(value, 'shape', None)
    return x.copy(value, _copy_ref=False, **{PARAM_SHAPE: shape})

  return jax.tree.map(tag, variables, is_leaf=_is_variable)


def state_metadata(variable: variablelib.Variable) -> dict[str, tp.Any]:
  """Metadata for a state leaf that stems from a parameter.

  A leaf of the parameter's shape is sharded by ``optimizer_sharding`` or like
  the parameter; extra leading axes (the history of L-BFGS) are not sharded, and
  a leaf of another shape (a factored moment) not at all.
  """
  metadata = variable.get_metadata()
  if 'optimizer_sharding' in metadata:
    metadata['out_sharding'] = metadata.pop('optimizer_sharding')
  param_shape = metadata.pop(PARAM_SHAPE, None)
  shape = getattr(variable.get_raw_value(), 'shape', None)
  if param_shape is None or shape is None or not metadata.get('out_sharding'):
    return metadata
  extra = len(shape) - len(param_shape)
  if extra < 0 or shape[extra:] != param_shape:
    del metadata['out_sharding']
  elif extra:
    metadata['out_sharding'] = _lead(metadata['out_sharding'], extra)
  return metadata


def _lead(sharding: tp.Any, extra: int) -> tp.Any:
  if isinstance(sharding, Format):  # a layout has no room for more axes
    sharding = sharding.sharding
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, _lead(sharding.spec, extra))
  lead = (None,) * extra
  if isinstance(sharding, PartitionSpec):
    return PartitionSpec(*lead, *sharding)
  return (*lead, *sharding)


def to_opt_state(tree: tp.Any, *, apart_from: tp.Any = ()) -> tp.Any:
  """Wraps each leaf of an optax state in a Variable of the optimizer.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    >>> from flax.nnx.training.optimizer import to_opt_state
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> state = to_opt_state(optax.adam(1e-2).init(nnx.state(model)))
    >>> type(state[0].mu['bias']).__name__
    'OptVariable'

  Args:
    tree: what ``tx.init`` returned for a State of Variables.
    apart_from: pytree of arrays with which the state must share no buffer, so
      that both can be donated.

  Returns:
    The same tree with an :class:`OptVariable` for each Variable and an
    :class:`OptArray` for each other leaf. Values are strongly typed, no two of
    them share a buffer, and sharding metadata fits their shapes.
  """
  tree = jax.tree.map(strongly_typed, tree)
  tree = unshared(tree, apart_from, buffers=True)

  def wrap(leaf):
    if not _is_variable(leaf):
      return OptArray(leaf)
    return OptVariable(leaf.get_value(), **state_metadata(leaf))

  return jax.tree.map(wrap, tree, is_leaf=_is_variable)
