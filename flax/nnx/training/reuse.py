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
"""Value and gradient that a line search leaves behind, for the next step.

``optax.value_and_grad_from_state`` finds them by the names ``value`` and
``grad``, which parameters may have as well. Here the state of the line search
itself is looked for.
"""
from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from flax.nnx import graphlib
from flax.nnx.training import evaluation
from flax.nnx.training.extra_args import (
  LINESEARCH_STATES,
  is_overridden,
  linesearch_states,
)
from flax.nnx.training.snapshot import Snapshot

_NEEDS = 'from_state needs the value and gradient that one line search stores'


def is_off(from_state: tp.Any) -> bool:
  """Whether ``from_state`` is the constant ``False``.

  Raises:
    TypeError: it is neither a bool nor a boolean array.
    ValueError: it is not a scalar.
  """
  if isinstance(from_state, (bool, np.bool_)):
    return not from_state
  if not isinstance(from_state, (jax.Array, np.ndarray)) or (
    from_state.dtype != bool
  ):
    raise TypeError(
      'from_state must be a bool or a boolean scalar array, got '
      f'{type(from_state).__name__}: {from_state!r}.'
    )
  if from_state.shape != ():
    raise ValueError(
      f'from_state must be a scalar, but its shape is {from_state.shape}.'
    )
  return False


def _stored(opt_state: tp.Any, snapshot: Snapshot[tp.Any]) -> tp.Any:
  """The state of the only line search, if it can be reused."""
  found = linesearch_states(opt_state)
  if len(found) != 1:
    raise ValueError(
      f'{_NEEDS}, but `tx` has {len(found) or "no"} line '
      f'search{"es" if found else ""}. Use from_state=False, or a `tx` with '
      'one, such as optax.lbfgs().'
    )
  search = found[0]
  if search.grad is None:
    raise ValueError(
      f'{_NEEDS}, but this one was made with store_grad=False. Make it with '
      'store_grad=True, or use from_state=False.'
    )
  if jax.tree.structure(search.grad) != jax.tree.structure(snapshot.params):
    raise ValueError(
      f'{_NEEDS}, but this one searches over only some of the parameters '
      '(optax.partition, optax.masked), so that what it stores is not of the '
      'parameters after the whole update. Use from_state=False.'
    )
  return search


def _ends_with_linesearch(opt_state: tp.Any) -> bool:
  """Whether a line search has the last word on the update."""
  if isinstance(opt_state, LINESEARCH_STATES):
    return True
  for name in ('inner_state', 'inner_opt_state'):
    if hasattr(opt_state, name):
      return _ends_with_linesearch(getattr(opt_state, name))
  # States of a chain; a transformation after the search would change where
  # the parameters end up.
  return (
    type(opt_state) is tuple
    and len(opt_state) > 0
    and _ends_with_linesearch(opt_state[-1])
  )


def is_possible(
  optimizer: tp.Any, snapshot: Snapshot[tp.Any], value: jax.Array
) -> bool:
  """Whether steps on the same data may reuse what the line search stores.

  Args:
    optimizer: the optimizer.
    snapshot: the model.
    value: a loss, for its dtype.
  """
  opt_state = graphlib.as_pure(optimizer.opt_state)
  if is_overridden(optimizer, 'update'):
    return False  # who knows where its update ends up
  if not _ends_with_linesearch(opt_state):
    return False
  try:
    search = _stored(opt_state, snapshot)
  except ValueError:
    return False
  return _bits(search.value) >= _bits(value)


def _bits(x: jax.Array) -> int:
  return jnp.finfo(x.dtype).bits


def evaluate_or_reuse(
  loss: evaluation.Loss[tp.Any],
  snapshot: Snapshot[tp.Any],
  *,
  opt_state: tp.Any,
  from_state: tp.Any,
  has_aux: bool = False,
) -> evaluation.Evaluation:
  """Like ``Loss.evaluate``, but takes what a line search has stored.

  Args:
    loss: the loss function with its arguments.
    snapshot: the model, and with respect to what to differentiate.
    has_aux: whether the loss function returns more than the loss.
    opt_state: pure state of the transformation.
    from_state: whether to reuse value and gradient where they are finite, a
      bool or a boolean scalar array.

  Raises:
    ValueError: there is nothing to reuse, or the forward pass may not be
      skipped.
  """
  if is_off(from_state):
    return loss.evaluate(snapshot)
  if has_aux:
    raise ValueError(
      'from_state skips the forward pass that would compute `aux`. Use '
      'has_aux=False with from_state, or from_state=False.'
    )
  search = _stored(opt_state, snapshot)
  passes = []

  def compute():
    result = loss.evaluate(snapshot)
    passes.append(result)
    return result.value, result.grads

  value_type, grads_type = jax.eval_shape(compute)
  evaluation.check_unchanged(passes[0])
  if _bits(search.value) < _bits(value_type):
    raise ValueError(
      f'from_state would round the loss from {value_type.dtype} to '
      f'{search.value.dtype}, the dtype in which this line search stores it '
      '(that of the first parameter). Use an optimizer of nnx.optimizers, '
      'which stores it in the default float dtype, or from_state=False.'
    )

  def reuse():
    cast = lambda x, like: x.astype(like.dtype)
    return (
      cast(search.value, value_type),
      jax.tree.map(cast, search.grad, grads_type),
    )

  finite = jnp.isfinite(search.value)
  for leaf in jax.tree.leaves(search.grad):
    finite &= jnp.isfinite(leaf).all()
  value, grads = jax.lax.cond(
    jnp.asarray(from_state) & finite, reuse, compute
  )
  return evaluation.Evaluation(value, None, grads, {}, {}, {}, ())
