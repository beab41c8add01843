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
"""The loss of a model, its gradient, and what the forward pass changed.

Value, gradient and the trials of a line search have to be taken of one and the
same function, so a forward pass here works on copies of the model and of the
arguments; what it changed (batch statistics, rng counts) is written back later.
"""
from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp

from flax import errors
from flax.nnx import graphlib, statelib, variablelib
from flax.nnx.training.arguments import Arguments, changes, check_reachable
from flax.nnx.training.params_function import check_scalar
from flax.nnx.training.snapshot import Path, Snapshot, path_str

M = tp.TypeVar('M')


class Evaluation(tp.NamedTuple):
  """One forward and backward pass.

  Attributes:
    value: the loss, a scalar.
    aux: what the loss function returned beside it, or ``None``.
    grads: gradient, a State of arrays shaped like the parameters.
    params: State of the parameters that the pass itself changed.
    rest: State of what else it changed in the model.
    arguments: State of what it changed in the arguments.
    changed: paths of what it changed in the model.
  """

  value: jax.Array
  aux: tp.Any
  grads: tp.Any
  params: tp.Any
  rest: tp.Any
  arguments: tp.Any
  changed: tuple[Path, ...]


class Loss(tp.Generic[M]):
  """A loss function with its arguments: one function of the model.

  Args:
    loss_fn: function of the model, of ``args`` and ``kwargs``; returns the
      loss, or (loss, aux) if ``has_aux``.
    args, kwargs: further arguments.
    has_aux: see ``loss_fn``.
    graph: graph mode of the optimizer.
  """

  def __init__(
    self,
    loss_fn: tp.Callable[..., tp.Any],
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    *,
    has_aux: bool,
    graph: bool | None,
  ):
    self._loss_fn = loss_fn
    self._has_aux = has_aux
    self.arguments = Arguments(args, kwargs, graph=graph)

  def call(self, model: M) -> tuple[tp.Any, tp.Any, tp.Any]:
    """Loss, aux, and State of what the call changed in the arguments."""
    nodes, args, kwargs = self.arguments.copies()
    try:
      result = self._loss_fn(model, *args, **kwargs)
    except errors.TraceContextError as error:
      error.add_note(
        'A loss may change the model and Modules among its arguments. Pass '
        'what it captures (an nnx.Rngs, say) as an argument.'
      )
      raise
    aux = None
    if self._has_aux:
      if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
          'With has_aux=True the loss function must return a pair (loss, aux), '
          f'but it returned {type(result).__name__}.'
        )
      result, aux = result
    value = check_scalar(graphlib.as_pure(result), 'loss_fn')
    return jnp.asarray(value), aux, self.arguments.changed_in(nodes)

  def value(self, model: M) -> jax.Array:
    """The loss alone, the ``value_fn`` of a line search."""
    return self.call(model)[0]

  def evaluate(self, snapshot: Snapshot[M]) -> Evaluation:
    """Loss and gradient of the model that ``snapshot`` remembers.

    Raises:
      TypeError, ValueError: the loss is not a real scalar.
    """
    snapshot.freeze()
    self.arguments.check_apart_from(snapshot.model)
    changed: list[Path] = []

    def of_params(params):
      model = snapshot.merge(params)
      value, aux, arguments = self.call(model)
      after = Snapshot(model, snapshot.wrt, graph=snapshot.graph)
      rest, paths = changes(snapshot.rest, after.rest)
      new_params, param_paths = changes(params, after.params)
      check_reachable(snapshot.model, rest, 'the model')
      _check_no_new(params, new_params)
      changed[:] = [*param_paths, *paths]
      return value, (aux, new_params, rest, arguments)

    grad_fn = jax.value_and_grad(of_params, has_aux=True)
    (value, (aux, new_params, rest, arguments)), grads = grad_fn(
      snapshot.params
    )
    return Evaluation(
      value, aux, grads, new_params, rest, arguments, tuple(changed)
    )

  def grad(self, model: M, snapshot: Snapshot[M]) -> tp.Any:
    """The gradient at another model than that of ``snapshot``."""
    trial = Snapshot(model, snapshot.wrt, graph=snapshot.graph)
    return self.evaluate(trial).grads


def _check_no_new(params: tp.Any, changed: tp.Any) -> None:
  known = {path for path, _ in statelib.to_flat_state(params)}
  for path, _ in statelib.to_flat_state(changed):
    if path not in known:
      raise ValueError(
        f'The loss creates the parameter {path_str(path)}, which the optimizer '
        'does not know. Create it before the optimizer: in __init__, or by '
        'calling the model once.'
      )


def with_variables(grads: tp.Any, snapshot: Snapshot[tp.Any]) -> tp.Any:
  """Pure gradient as a State of Variables, as ``nnx.grad`` returns it."""
  entries = dict(statelib.to_flat_state(snapshot.variables))

  def wrap(path, like):
    leaf = functools.reduce(lambda node, key: node[key], path, grads)
    if not isinstance(like, variablelib.Variable):
      return leaf
    return like.copy(leaf, ref=False, hijax=False, _copy_ref=False)

  return statelib.from_flat_state(
    [(path, wrap(path, like)) for path, like in entries.items()]
  )


def check_unchanged(evaluation: Evaluation) -> None:
  """Checks that the forward pass may be skipped, for ``from_state``.

  Raises:
    ValueError: it changed Variables of the model, or of an argument.
  """
  if evaluation.changed or evaluation.arguments:
    names = [path_str(path) for path in evaluation.changed[:5]]
    names += ['an argument of the loss'] if evaluation.arguments else []
    raise ValueError(
      'from_state reuses the value and gradient of the last line search '
      'instead of a forward pass, but this loss changes other Variables than '
      f'the parameters in its forward pass: {", ".join(names)}. Leave '
      'from_state=False, or evaluate a model in inference mode, as '
      'model.eval() makes it.'
    )
