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
"""What the line searches of ``nnx.optimizers`` have in common.

The search itself is an optax transformation. Added here: it recovers from a
search that failed, and it accepts losses of any floating dtype.
"""
from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import optax

from flax.nnx.training.extra_args import has_linesearch


class LinesearchInfo(tp.NamedTuple):
  """What the last line search of an optimizer found; arrays, all scalar.

  Attributes:
    learning_rate: the factor of the update direction (dimensionless), 0 if the
      search failed.
    value: loss at the resulting parameters.
    num_steps: evaluations of the loss, 0 before the first search.
    decrease_error: by how much the loss misses sufficient decrease, in units of
      the loss; infinite before the first search and for non-finite losses.
    curvature_error: by how much the slope misses the curvature condition
      (dimensionless), or ``None`` for a search that does not check it.
    failed: whether no learning rate was acceptable. The parameters are then
      as they were before.
  """

  learning_rate: jax.Array
  value: jax.Array
  num_steps: jax.Array
  decrease_error: jax.Array
  curvature_error: jax.Array | None
  failed: jax.Array


class RecoveringState(tp.NamedTuple):
  """State of :func:`recovering`.

  Attributes:
    inner_state: states of the direction and of the line search.
    failed: whether the last search failed.
  """

  inner_state: tuple[tp.Any, tp.Any]
  failed: jax.Array


def _all_finite(tree: tp.Any) -> jax.Array:
  leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
  return functools.reduce(jnp.logical_and, leaves, jnp.array(True))


def _select(condition: jax.Array, if_true: tp.Any, if_false: tp.Any) -> tp.Any:
  return jax.tree.map(
    lambda t, f: jnp.where(condition, t, f), if_true, if_false
  )


def _in_default_float(
  value_fn: tp.Callable[..., tp.Any],
) -> tp.Callable[..., jax.Array]:
  # Optax transposes the linearized loss with the cotangent 1.0, which has the
  # default dtype, whatever that of the loss.
  @functools.wraps(value_fn)
  def wrapper(*args, **kwargs):
    return jnp.asarray(value_fn(*args, **kwargs), jnp.result_type(float))

  return wrapper


def recovering(
  direction: optax.GradientTransformation,
  linesearch: optax.GradientTransformationExtraArgs,
  *,
  is_failure: tp.Callable[[tp.Any], jax.Array],
  restart_learning_rate: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
  """``optax.chain(direction, linesearch)`` that a failed search does not stop.

  Optax answers a loss that is not finite with learning rate 0, from which no
  later search gets away. Here a failed search changes nothing: the update is
  zero, the next search starts from ``restart_learning_rate``, and if value or
  gradient were not finite the direction forgets them.

  Args:
    direction: gives the direction of the update.
    linesearch: a line search of optax.
    is_failure: tells from the state of ``linesearch`` whether it failed.
    restart_learning_rate: what to store as the learning rate of a failed
      search (scalar, dimensionless).

  Returns:
    A transformation whose update takes ``value``, ``grad`` and ``value_fn``.
  """
  chain = optax.chain(direction, linesearch)

  def init_fn(params):
    return RecoveringState(chain.init(params), jnp.array(False))

  def update_fn(
    updates, state, params=None, *, value, grad, value_fn, **extra_args
  ):
    value = jnp.asarray(value, jnp.result_type(float))
    usable = _all_finite((updates, value))
    updates, (direction_state, search_state) = chain.update(
      updates,
      state.inner_state,
      params,
      value=value,
      grad=grad,
      value_fn=_in_default_float(value_fn),
      **extra_args,
    )
    failed = is_failure(search_state)
    start = search_state._replace(
      learning_rate=jnp.asarray(restart_learning_rate),
      value=value,
      grad=None if search_state.grad is None else grad,
    )
    start = optax.tree.cast_like(start, other_tree=search_state)
    updates = _select(failed, optax.tree.zeros_like(updates), updates)
    return updates, RecoveringState(
      inner_state=(
        _select(usable, direction_state, state.inner_state[0]),
        _select(failed, start, search_state),
      ),
      failed=failed,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def linesearch_info(state: RecoveringState) -> LinesearchInfo:
  """Reads what the last search found from the state of :func:`recovering`."""
  _, search = state.inner_state
  learning_rate = jnp.asarray(search.learning_rate)
  return LinesearchInfo(
    learning_rate=jnp.where(
      state.failed, jnp.zeros_like(learning_rate), learning_rate
    ),
    value=search.value,
    num_steps=search.info.num_linesearch_steps,
    decrease_error=search.info.decrease_error,
    curvature_error=getattr(search.info, 'curvature_error', None),
    failed=state.failed,
  )


def check_direction(
  name: str, tx: optax.GradientTransformation, params: tp.Any, wrt: tp.Any
) -> None:
  """Checks that ``tx`` can give a line search its direction.

  Args:
    name: of the optimizer, for the message.
    tx: the transformation that gives the direction.
    params: State of the parameters.
    wrt: filter that selected them.

  Raises:
    ValueError: there are no parameters, or ``tx`` has a line search already.
  """
  if not jax.tree.leaves(params):
    raise ValueError(
      f'nnx.optimizers.{name} has nothing to optimize: wrt={wrt!r} selects no '
      'Variable of the model. Pass a filter that does, such as nnx.Param.'
    )
  if has_linesearch(jax.eval_shape(tx.init, params)):
    raise ValueError(
      f'The `tx` of nnx.optimizers.{name} contains a line search already. Pass '
      'one without, such as optax.lbfgs(linesearch=None), or use nnx.Optimizer '
      'with this `tx` as it is.'
    )
