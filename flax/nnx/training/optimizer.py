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
"""``nnx.Optimizer``: an optax transformation that updates a Module in place."""
from __future__ import annotations

import typing as tp

import optax
from jax import numpy as jnp

from flax.nnx import filterlib, graphlib, pytreelib, statelib
from flax.nnx.training import extra_args as extra_args_lib
from flax.nnx.training import write_back
from flax.nnx.training.opt_state import OptArray as OptArray
from flax.nnx.training.opt_state import OptState as OptState
from flax.nnx.training.opt_state import OptVariable as OptVariable
from flax.nnx.training.opt_state import tag_params
from flax.nnx.training.opt_state import to_opt_state as to_opt_state
from flax.nnx.training.snapshot import Snapshot, path_str
from flax.nnx.training.steps import TrainSteps
from flax.nnx.variablelib import Param
from flax.typing import MISSING, Missing

M = tp.TypeVar('M')

_MOVED = (
  'Since Flax 0.11.0 an Optimizer no longer holds the model; '
  'nnx.ModelAndOptimizer is the class that still does.'
)


class Optimizer(TrainSteps[M], pytreelib.Pytree):
  """Optimizes the parameters of a Module with an optax transformation.

  Example usage::

    >>> import jax.numpy as jnp
    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    >>> x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
    ...
    >>> @nnx.jit
    ... def train_step(model, optimizer, x, y):
    ...   loss_fn = lambda model: ((model(x) - y) ** 2).mean()
    ...   loss, grads = nnx.value_and_grad(loss_fn)(model)
    ...   optimizer.update(model, grads, value=loss, value_fn=loss_fn)
    ...   return loss
    ...
    >>> first = train_step(model, optimizer, x, y)
    >>> second = train_step(model, optimizer, x, y)
    >>> assert second < first

  This step serves every optax optimizer: those that need the loss and the loss
  function (``optax.lbfgs``, ``optax.polyak_sgd``) get them, the others don't.

  Attributes:
    step: Variable with the number of updates, a ``uint32`` scalar.
    tx: the optax transformation.
    opt_state: the state of ``tx``, with a Variable for each array (see
      :class:`~flax.nnx.training.optimizer.OptState`).
    wrt: filter of the Variables that are optimized.
    graph: graph mode, tree mode, or ``None`` for the mode of the context.
  """

  def __init__(
    self, model: M, tx: optax.GradientTransformation, *,
    wrt: filterlib.Filter | Missing = MISSING,
    graph: bool | None = None,
  ):
    """Starts the state of ``tx`` for the parameters of ``model``.

    Args:
      model: a Module (or a tuple of Modules, or a State). It is not kept.
      tx: an optax transformation.
      wrt: filter that selects the parameters: a Variable type such as
        :class:`~flax.nnx.Param`, a tuple of them, or any other NNX filter.
        Gradients are to be taken with the same one, through
        :class:`~flax.nnx.DiffState` unless it is ``nnx.Param``.
      graph: ``True`` for graph mode, where Modules may share Variables,
        ``False`` for tree mode, ``None`` for the mode of the current
        ``nnx.set_graph_mode`` context.

    Raises:
      TypeError: ``wrt`` is not given.
    """
    if isinstance(wrt, Missing):
      raise TypeError(
        'Missing required argument `wrt`, the filter of the Variables to '
        f'optimize: nnx.{type(self).__name__}(model, tx, wrt=nnx.Param). '
        + _MOVED
      )
    self.graph = graph
    self.step = OptState(jnp.zeros((), jnp.uint32))
    self.tx = tx
    params = graphlib.state(model, wrt, graph=graph)
    self.opt_state = pytreelib.data(
      to_opt_state(
        tx.init(tag_params(params)),
        apart_from=graphlib.as_pure(params),
      )
    )
    self.wrt = wrt

  if not tp.TYPE_CHECKING:

    def __getattr__(self, name: str) -> tp.Any:
      hint = f' {_MOVED}' if name == 'model' else ''
      raise AttributeError(
        f'{type(self).__name__} does not have attribute {name!r}.{hint}',
        name=name,
        obj=self,
      )

  def extra_args(
    self, model: M, grads: tp.Any, kwargs: dict[str, tp.Any]
  ) -> dict[str, tp.Any]:
    """The extra arguments for ``tx.update``; the hook for subclasses.

    An optimizer that derives its own extra arguments overrides this method,
    and calls it with what it adds: functions of the model become functions of
    the parameters here.

    Example usage::

      >>> from flax import nnx
      >>> import optax
      ...
      >>> class PolyakSGD(nnx.Optimizer):
      ...   def extra_args(self, model, grads, kwargs):
      ...     value = kwargs['value_fn'](model)
      ...     return super().extra_args(model, grads, {'value': value})
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = PolyakSGD(model, optax.polyak_sgd(), wrt=nnx.Param)
      >>> loss_fn = lambda model: (model.kernel ** 2).sum()
      >>> grads = nnx.grad(loss_fn)(model)
      >>> _ = optimizer.update(model, grads, value_fn=loss_fn)

    Args:
      model: the model, as it was given to :meth:`update`. It must not be
        changed here.
      grads: gradient, a State of arrays shaped like the parameters.
      kwargs: keyword arguments of :meth:`update`.

    Returns:
      Keyword arguments for ``tx.update``, only those that it accepts. See
      :meth:`update` for what becomes of callbacks and of ``grad``.

    Raises:
      ValueError: ``kwargs['grad']`` lacks some parameter.
    """
    return extra_args_lib.to_params_args(
      kwargs, model=model, grads=grads, tx=self.tx, wrt=self.wrt,
      graph=self.graph,
    )

  def update(
    self, model: M, grads: tp.Any = MISSING, /, **kwargs
  ) -> optax.Updates:
    """Updates the parameters of ``model`` and the optimizer state, in place.

    Example usage::

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      ...
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
      >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
      >>> x = jnp.ones((4, 2))
      ...
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...   loss, grads = nnx.value_and_grad(loss_fn)(model, x)
      ...   optimizer.update(model, grads, value=loss, value_fn=loss_fn, x=x)
      ...   return loss
      ...
      >>> losses = [train_step(model, optimizer, x) for _ in range(3)]
      >>> assert losses[2] < losses[0]

    Extra arguments reach ``tx.update`` if it takes them (see
    ``optax.GradientTransformationExtraArgs``), in this form:

    * A function (``value_fn``, ``obj_fn``, ``grad_fn``) is called with a model:
      candidate parameters, and otherwise ``model`` as it is now. It may change
      that model (batch statistics, rng counts); nothing of it reaches
      ``model``. A function whose first parameter is annotated as
      :class:`~flax.nnx.State` gets the State of the candidate parameters
      instead, as does one that fails for the model but not for the State.
    * ``grad``, which line searches need, is supplied when ``value_fn`` is given
      or ``tx.update`` names it; it may be passed to override it.
    * Variables are replaced by their values. A line search hands arguments
      that ``value_fn`` names (``x`` above) on to it.

    Args:
      model: the model whose parameters are updated.
      grads: gradient of the loss, as :func:`~flax.nnx.grad` returns it (a
        State, or a Module in tree mode), or a tree of arrays at the same paths.
        Entries for other Variables than those of ``wrt`` are ignored.
      **kwargs: extra arguments for ``tx.update``.

    Returns:
      The updates that were added to the parameters: a State of arrays of their
      shapes.

    Raises:
      TypeError: ``grads`` is not given; a line search lacks ``value`` or
        ``value_fn``; a loss is not a real number.
      ValueError: ``grads`` lacks some parameter or does not have its shape; a
        loss is not a scalar. Model and optimizer are unchanged after any error.
    """
    if isinstance(grads, Missing):
      grads = kwargs.pop('grads', MISSING)
    if isinstance(grads, Missing):
      raise TypeError(
        'Missing required argument `grads`, the gradient of the loss: '
        'optimizer.update(model, grads). ' + _MOVED
      )
    snapshot = Snapshot(model, self.wrt, graph=self.graph)
    grads = snapshot.align(grads, 'grads')
    old_state = graphlib.as_pure(self.opt_state)
    extra_args = self.extra_args(model, grads, kwargs)
    if extra_args_lib.linesearch_states(old_state):
      extra_args_lib.check_linesearch_args(extra_args)

    try:
      updates, new_state = self.tx.update(
        grads, old_state, snapshot.params, **extra_args
      )
    except ValueError as error:
      if 'pytree' in str(error):
        error.add_note(
          'Was the optimizer made for this model, with the same `wrt`? Its '
          'state has to fit the parameters.'
        )
      raise
    new_params = optax.apply_updates(snapshot.params, updates)

    _check_shapes(new_params, snapshot.params)
    new_params = write_back.settle(
      new_params, snapshot.variables, declared_by='optimizer_sharding'
    )
    new_state = write_back.settle(
      new_state, self.opt_state, declared_by='out_sharding'
    )
    new_state = write_back.unshared(new_state, new_params, buffers=False)
    write_back.write(self.opt_state, self.opt_state, new_state)
    write_back.write(model, snapshot.variables, new_params)
    self.step[...] += 1
    return updates


def _check_shapes(new_params: tp.Any, params: tp.Any) -> None:
  """Broadcasting must not give a parameter another shape."""
  old = dict(statelib.to_flat_state(params))
  for path, new in statelib.to_flat_state(new_params):
    if jnp.shape(new) != jnp.shape(old[path]):
      raise ValueError(
        f'The update of {path_str(path)} would change its shape from '
        f'{jnp.shape(old[path])} to {jnp.shape(new)}. Pass `grads` of the '
        "parameters' own shapes (or a `tx` that reduces them, for gradients "
        'per example).'
      )


class ModelAndOptimizer(Optimizer[M]):
  """An :class:`Optimizer` that holds its model too (deprecated).

  Kept for code written before Flax 0.11.0. New code passes the model to
  :meth:`Optimizer.update`.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    >>> grads = nnx.grad(lambda model: (model.kernel ** 2).sum())(model)
    >>> _ = optimizer.update(grads)
    >>> optimizer.model is model
    True
  """

  def __init__(
    self, model: M, tx: optax.GradientTransformation, *,
    wrt: filterlib.Filter = Param,
  ):
    super().__init__(model, tx, wrt=wrt)
    self.model = model

  def update(self, grads: tp.Any, /, **kwargs) -> optax.Updates:  # type: ignore
    """Like :meth:`Optimizer.update`, for the model held by this object."""
    return super().update(self.model, grads, **kwargs)

  def _update_model(self, model, grads, extra_args):
    if model is not self.model:
      raise ValueError(
        'This ModelAndOptimizer updates the model that it holds, but another '
        'one was given. Pass optimizer.model, or use nnx.Optimizer.'
      )
    self.update(grads, **extra_args)
