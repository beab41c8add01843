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
"""Whole train steps: evaluate a loss consistently, then update."""
from __future__ import annotations

import functools
import typing as tp

import jax
import numpy as np
import optax.contrib
from jax.typing import ArrayLike

from flax.nnx import graphlib, statelib
from flax.nnx.training import eager, evaluation, extra_args, reuse
from flax.nnx.training.snapshot import Snapshot

A = tp.TypeVar('A')
M = tp.TypeVar('M')
P = tp.ParamSpec('P')
FromState = bool | np.bool_ | jax.Array


def _evaluate(optimizer, loss_fn, model, args, kwargs, has_aux, from_state):
  loss = evaluation.Loss(
    loss_fn, args, kwargs, has_aux=has_aux, graph=optimizer.graph
  )
  snapshot = Snapshot(model, optimizer.wrt, graph=optimizer.graph)
  result = reuse.evaluate_or_reuse(
    loss,
    snapshot,
    opt_state=graphlib.as_pure(optimizer.opt_state),
    from_state=from_state,
    has_aux=has_aux,
  )
  return loss, snapshot, result


def _write(model, loss, result):
  graphlib.update(model, result.params)
  graphlib.update(model, result.rest)
  loss.arguments.write(result.arguments)


def _loss_args(optimizer, loss, snapshot, result) -> dict[str, tp.Any]:
  """Extra arguments that a loss gives, as far as optimizer and ``tx`` take."""
  given = {
    'value': result.value,
    'value_fn': loss.value,
    'grad_fn': lambda model, *_: loss.grad(model, snapshot),
    'obj_fn': loss.value,
  }
  tx = extra_args.accepted_by(optimizer.tx)
  update = extra_args.accepted(optimizer.update, num_positional=2)
  wanted = {'value', 'value_fn'} | (tx.names & {'grad_fn', 'obj_fn'})
  if extra_args.find_states(optimizer.opt_state, optax.contrib.HutchinsonState):
    # Line searches raise on arguments that they do not know.
    if not extra_args.linesearch_states(optimizer.opt_state):
      wanted.add('obj_fn')
  # An `extra_args` of the user's own makes of them what `tx` takes.
  own = extra_args.is_overridden(optimizer, 'extra_args')
  return {
    name: value
    for name, value in given.items()
    if name in wanted and (own or name in tx) and name in update
  }


def apply_evaluation(optimizer, model, loss, snapshot, result) -> None:
  """Updates ``model`` with what the loss was found to be there."""
  if result.params:  # the loss itself has set some: the update starts there
    graphlib.update(model, result.params)
  try:
    optimizer._update_model(
      model,
      evaluation.with_variables(result.grads, snapshot),
      _loss_args(optimizer, loss, snapshot, result),
    )
  except Exception:
    if result.params:
      graphlib.update(model, snapshot.params)
    raise
  # Only now, so that the trials of a search start from what the forward pass
  # started from.
  _write(model, loss, result._replace(params={}))


def _train_step(
  loss_fn, optimizer, model, args, kwargs, has_aux, from_state
):
  loss, snapshot, result = _evaluate(
    optimizer, loss_fn, model, args, kwargs, has_aux, from_state
  )
  apply_evaluation(optimizer, model, loss, snapshot, result)
  return (result.value, result.aux) if has_aux else result.value


class TrainSteps(tp.Generic[M]):
  """The methods of ``nnx.Optimizer`` that evaluate the loss themselves."""

  @tp.overload
  def value_and_grad(
    self,
    loss_fn: tp.Callable[tp.Concatenate[M, P], ArrayLike],
    *,
    has_aux: tp.Literal[False] = False,
    from_state: FromState = False,
  ) -> tp.Callable[
    tp.Concatenate[M, P], tuple[jax.Array, statelib.State]
  ]: ...

  @tp.overload
  def value_and_grad(
    self,
    loss_fn: tp.Callable[tp.Concatenate[M, P], tuple[ArrayLike, A]],
    *,
    has_aux: tp.Literal[True],
    from_state: FromState = False,
  ) -> tp.Callable[
    tp.Concatenate[M, P], tuple[tuple[jax.Array, A], statelib.State]
  ]: ...

  def value_and_grad(
    self,
    loss_fn: tp.Callable[..., tp.Any],
    *,
    has_aux: bool = False,
    from_state: FromState = False,
  ) -> tp.Callable[..., tp.Any]:
    """Loss and gradient with respect to the parameters of this optimizer.

    Like :func:`~flax.nnx.value_and_grad`, but it differentiates what ``wrt``
    selects, in tree mode too, and can take both from the last line search.

    Example usage::

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(
      ...   model, optax.adam(1e-2), wrt=nnx.PathContains('bias')
      ... )
      >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
      >>> x = jnp.ones((4, 2))
      >>> loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
      >>> list(grads)
      ['bias']

    Args:
      loss_fn: function of a model and other arguments. Returns the loss, a
        real scalar, or (loss, aux) if ``has_aux``.
      has_aux: see ``loss_fn``.
      from_state: whether to reuse the value and gradient that the line search
        of ``tx`` has stored, where they are finite; see
        :meth:`value_and_update`.

    Returns:
      A function of the model and the other arguments of ``loss_fn``. It returns
      (loss, gradient), or ((loss, aux), gradient); the gradient is a State.
      The model keeps what the forward pass changed in it.

    Raises:
      TypeError, ValueError: by the returned function, see
        :meth:`value_and_update`.
    """

    @functools.wraps(loss_fn)
    def evaluate(model, *args, **kwargs):
      loss, snapshot, result = _evaluate(
        self, loss_fn, model, args, kwargs, has_aux, from_state
      )
      _write(model, loss, result)
      value = (result.value, result.aux) if has_aux else result.value
      return value, evaluation.with_variables(result.grads, snapshot)

    return evaluate

  @tp.overload
  def value_and_update(
    self,
    loss_fn: tp.Callable[tp.Concatenate[M, P], ArrayLike],
    *,
    has_aux: tp.Literal[False] = False,
    from_state: FromState = False,
  ) -> tp.Callable[tp.Concatenate[M, P], jax.Array]: ...

  @tp.overload
  def value_and_update(
    self,
    loss_fn: tp.Callable[tp.Concatenate[M, P], tuple[ArrayLike, A]],
    *,
    has_aux: tp.Literal[True],
    from_state: FromState = False,
  ) -> tp.Callable[tp.Concatenate[M, P], tuple[jax.Array, A]]: ...

  def value_and_update(
    self,
    loss_fn: tp.Callable[..., tp.Any],
    *,
    has_aux: bool = False,
    from_state: FromState = False,
  ) -> tp.Callable[..., tp.Any]:
    """The whole train step, for every optax optimizer.

    Example usage::

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
      >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
      ...
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...   return optimizer.value_and_update(loss_fn)(model, x)
      ...
      >>> x = jnp.ones((4, 2))
      >>> losses = [train_step(model, optimizer, x) for _ in range(3)]
      >>> assert losses[2] < losses[0]

    The loss, its gradient and every trial of a line search start from the same
    model: with Dropout they see the same mask, with BatchNorm the same
    statistics. The model keeps what one forward pass changed in it, and the
    next step goes on from there. The same holds for Modules among the other
    arguments, such as an :class:`~flax.nnx.Rngs`. What is kept are the
    Variables that the pass changed or added; Python attributes that it set, and
    the removal of Variables, are not.

    Called outside of ``jit`` the step is compiled once for the same code, what
    it captures, and the shapes of the arguments; arguments that are no arrays
    keep their Python values. A loss that captures what may change in place (a
    Module, an object), or cannot be compiled, runs uncompiled, which for a line
    search takes about a second per step: pass Modules as arguments. Python
    effects, such as ``print``, happen only where the step is compiled.

    Args:
      loss_fn: function of a model and other arguments. Returns the loss, a
        real scalar, or (loss, aux) if ``has_aux``.
      has_aux: see ``loss_fn``.
      from_state: a bool or a boolean scalar array (it may be traced). Where it
        is true, and they are finite, value and gradient are not computed, but
        taken from the state of the line search, which ended at the current
        parameters. That is right as long as neither the data nor anything but
        ``tx`` has changed since, and saves a forward and a backward pass.

    Returns:
      A function of the model and the other arguments of ``loss_fn``, which
      updates the model and this optimizer and returns the loss before the
      update, or (loss, aux).

    Raises:
      TypeError: by the returned function, if the loss is not a real number.
      ValueError: by the returned function, if the loss is not a scalar, or
        ``from_state`` is used where nothing can be reused: without a line
        search that stores the gradient, or with a loss that changes the
        model's other Variables.
    """

    step = self._eager_step(_train_step, loss_fn)

    @functools.wraps(loss_fn)
    def train_step(model, *args, **kwargs):
      return step(self, model, args, kwargs, has_aux, from_state)

    return train_step

  def _eager_step(self, body, loss_fn):
    """``body`` with ``loss_fn``, to be compiled where the loss can be."""
    if extra_args.is_overridden(self, 'update'):
      # A user's `update` may do more than update arrays.
      return functools.partial(body, loss_fn)
    return eager.Step(body, loss_fn, graph=self.graph)

  def _update_model(
    self, model: M, grads: tp.Any, extra_args: dict[str, tp.Any]
  ) -> None:
    self.update(model, grads, **extra_args)
