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

from flax.nnx import graphlib
from flax.nnx.training.extra_args import LINESEARCH_STATES, linesearch_states
from flax.nnx.training.optimizer import Optimizer
from flax.typing import MISSING, Missing

M = tp.TypeVar('M')


class LinesearchInfo(tp.NamedTuple):
  """What the last line search of an optimizer found; arrays, all scalar.

  Example usage::

    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.optimizers.BacktrackingLinesearch(model, wrt=nnx.Param)
    >>> loss_fn = lambda model: (model.kernel ** 2).sum()
    >>> _ = optimizer.value_and_update(loss_fn)(model)
    >>> info = optimizer.linesearch_info
    >>> bool(info.failed), int(info.num_steps) > 0
    (False, True)

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


def _in_search_dtype(tree: tp.Any) -> tp.Any:
  """Real floating leaves in the default float dtype.

  There a loss is fine enough to be compared (bfloat16 is not), and parameters
  of several dtypes can be searched with one learning rate. Callbacks get their
  candidates in the dtypes of the parameters all the same.
  """
  dtype = jnp.result_type(float)
  is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: x.astype(dtype) if is_real(x) else x, tree)


def recovering(
  direction: optax.GradientTransformation,
  linesearch: optax.GradientTransformationExtraArgs,
  *,
  is_failure: tp.Callable[[tp.Any, jax.Array, jax.Array], jax.Array],
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
    is_failure: tells whether a search failed, from its state, the value it
      started from and the slope along the direction there.
    restart_learning_rate: what to store as the learning rate of a failed
      search (scalar, dimensionless).

  Returns:
    A transformation whose update takes ``value``, ``grad`` and ``value_fn``.
  """
  direction = optax.with_extra_args_support(direction)

  def init_fn(params):
    search_state = _in_search_dtype(linesearch.init(_in_search_dtype(params)))
    return RecoveringState(
      (direction.init(params), search_state), jnp.array(False)
    )

  def update_fn(
    updates, state, params=None, *, value, grad, value_fn, **extra_args
  ):
    value = jnp.asarray(value, jnp.result_type(float))
    grad = _in_search_dtype(grad)
    extra_args = {
      **extra_args,
      'value': value,
      'grad': grad,
      'value_fn': _in_default_float(value_fn),
    }
    usable = _all_finite((updates, value))
    old_direction_state, search_state = state.inner_state
    updates, direction_state = direction.update(
      updates, old_direction_state, params, **extra_args
    )
    updates = _in_search_dtype(updates)
    slope = optax.tree.real(optax.tree.vdot(updates, optax.tree.conj(grad)))
    updates, search_state = linesearch.update(
      updates, search_state, _in_search_dtype(params), **extra_args
    )
    failed = is_failure(search_state, value, slope)
    start = search_state._replace(
      learning_rate=jnp.asarray(restart_learning_rate),
      value=value,
      grad=None if search_state.grad is None else grad,
    )
    start = optax.tree.cast_like(start, other_tree=search_state)
    updates = _select(failed, optax.tree.zeros_like(updates), updates)
    return updates, RecoveringState(
      inner_state=(
        _select(usable, direction_state, old_direction_state),
        _select(failed, start, search_state),
      ),
      failed=failed,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class LinesearchOptimizer(Optimizer[M]):
  """What the line searches of ``nnx.optimizers`` have in common."""

  def _start(
    self,
    model: M,
    direction: optax.GradientTransformation,
    linesearch: tp.Any,
    *,
    wrt: tp.Any,
    graph: bool | None,
    is_failure: tp.Callable[..., jax.Array],
    restart_learning_rate: jax.typing.ArrayLike,
  ) -> None:
    """Checks the parts, see :func:`recovering`, and starts their states."""
    name = type(self).__name__
    if not isinstance(wrt, Missing):
      params = graphlib.as_pure(graphlib.state(model, wrt, graph=graph))
      if not jax.tree.leaves(params):
        raise ValueError(
          f'nnx.optimizers.{name} has nothing to optimize: wrt={wrt!r} selects '
          'no Variable of the model. Pass a filter that does, such as '
          'nnx.Param.'
        )
      if linesearch_states(jax.eval_shape(direction.init, params)):
        raise ValueError(
          f'The `tx` of nnx.optimizers.{name} contains a line search already. '
          'Pass one without, such as optax.lbfgs(linesearch=None), or use '
          'nnx.Optimizer with this `tx` as it is.'
        )
      if linesearch is None or not isinstance(
        jax.eval_shape(linesearch.init, params), LINESEARCH_STATES
      ):
        raise ValueError(
          f'The `linesearch` of nnx.optimizers.{name} must be a line search of '
          'optax by itself, such as optax.scale_by_zoom_linesearch(20). Use '
          'nnx.Optimizer for a `tx` without one.'
        )
    tx = recovering(
      direction,
      linesearch,
      is_failure=is_failure,
      restart_learning_rate=restart_learning_rate,
    )
    super().__init__(model, tx, wrt=wrt, graph=graph)

  def update(
    self,
    model: M,
    grads: tp.Any = MISSING,
    /,
    *,
    value: jax.typing.ArrayLike | Missing = MISSING,
    value_fn: tp.Callable[..., jax.typing.ArrayLike] | Missing = MISSING,
    **kwargs,
  ) -> optax.Updates:
    """Searches along the direction and updates ``model`` in place.

    Example usage::

      >>> from flax import nnx
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
      >>> loss_fn = lambda model: (model.kernel ** 2).sum()
      >>> loss, grads = nnx.value_and_grad(loss_fn)(model)
      >>> _ = optimizer.update(model, grads, value=loss, value_fn=loss_fn)
      >>> bool(loss_fn(model) < loss)
      True

    Args:
      model: the model whose parameters are updated.
      grads: gradient of the loss at the current parameters.
      value: loss at the current parameters, a floating-point scalar. Required.
      value_fn: the loss as a function of the model; it may take more
        arguments, given by keyword. It returns a scalar and may change the
        model it gets, which is not ``model``. Required.
      **kwargs: arguments of ``value_fn``, and extra arguments of ``tx``.

    Returns:
      The updates that were added to the parameters, zero if the search failed.

    Raises:
      TypeError: ``grads``, ``value`` or ``value_fn`` is not given, or a loss is
        not a real number.
      ValueError: ``grads`` lacks some parameter, or a loss is not a scalar.
    """
    given = {'value': value, 'value_fn': value_fn, **kwargs}
    given = {k: v for k, v in given.items() if not isinstance(v, Missing)}
    return super().update(model, grads, **given)

  @property
  def linesearch_info(self) -> LinesearchInfo:
    """What the last search found, a :class:`LinesearchInfo` of scalars.

    Example usage::

      >>> from flax import nnx
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
      >>> int(optimizer.linesearch_info.num_steps)
      0
    """
    state = graphlib.as_pure(self.opt_state)
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


def check_range(
  name: str, number: tp.Any, low: float, high: float = jnp.inf
) -> None:
  """Checks an argument: a count from ``low`` on, or a number above ``low``.

  Raises:
    ValueError: it is out of range.
  """
  is_count = isinstance(low, int)
  ok = low <= number if is_count else low < number
  if not ok or not (number < high or high == jnp.inf):
    bounds = f'at least {low}' if is_count else f'greater than {low}'
    bounds += '' if high == jnp.inf else f' and less than {high}'
    raise ValueError(f'`{name}` must be {bounds}, got {number!r}.')
