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
"""The backtracking line search."""
from __future__ import annotations

import typing as tp

import optax

from flax.nnx import filterlib
from flax.nnx.optimizers import _search
from flax.typing import MISSING, Missing

M = tp.TypeVar('M')


@tp.final
class BacktrackingLinesearch(_search.LinesearchOptimizer[M]):
  r"""Steps along a descent direction as far as the loss decreases enough.

  With parameters :math:`w`, loss :math:`f` and the direction :math:`u` that
  ``tx`` makes of the gradient, the update is :math:`\eta u`. The learning rate
  :math:`\eta` is multiplied by ``decrease_factor`` until

  .. math::
    f(w + \eta u) \leq (1 + \mathrm{rtol}) f(w)
    + \mathrm{slope\_rtol} \; \eta \langle u, \nabla f(w) \rangle
    + \mathrm{atol},

  the Armijo condition (``c1`` and ``maxiter`` of other libraries are
  ``slope_rtol`` and ``max_backtracking_steps`` here). No learning rate has to
  be tuned. The search is ``optax.scale_by_backtracking_linesearch``; unlike
  plain optax it recovers from a failed search, and takes losses of any
  floating dtype.

  Example usage::

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.optimizers.BacktrackingLinesearch(model, wrt=nnx.Param)
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
    >>> bool(optimizer.linesearch_info.failed)
    False

  The direction must be one of descent: ``optax.sgd`` without momentum always
  gives one, momentum and Adam mostly do. Where it is not, or the loss is not
  finite, the search fails: the parameters stay as they are, ``failed`` of
  :attr:`linesearch_info` is set, and the next search starts from
  ``max_learning_rate``. If value or gradient were not finite, the state of
  ``tx`` stays as it is, too.

  Reference: Vaswani et al., `Painless stochastic gradient
  <https://arxiv.org/abs/1905.09997>`_, 2019; Nocedal and Wright, *Numerical
  optimization*, 2nd ed., chapter 3.
  """

  def __init__(
    self,
    model: M,
    tx: optax.GradientTransformation = optax.sgd(1.0),
    *,
    wrt: filterlib.Filter | Missing = MISSING,
    graph: bool | None = None,
    max_backtracking_steps: int = 15,
    slope_rtol: float = 1e-4,
    decrease_factor: float = 0.8,
    increase_factor: float = 1.5,
    max_learning_rate: float = 1.0,
    atol: float = 0.0,
    rtol: float = 0.0,
    store_grad: bool = False,
    verbose: bool = False,
  ):
    """Starts the search and the state of ``tx``.

    Args:
      model: a Module (or a tuple of Modules, or a State). It is not kept.
      tx: gives the direction, and its length at learning rate 1.
      wrt: filter of the Variables to optimize, as in
        :class:`~flax.nnx.Optimizer`.
      graph: graph mode, as in :class:`~flax.nnx.Optimizer`.
      max_backtracking_steps: times the learning rate may be decreased; the
        loss is evaluated once more than that at most.
      slope_rtol: share of the decrease promised by the slope that is required
        (dimensionless).
      decrease_factor: of the learning rate, after each rejected trial; between
        0 and 1.
      increase_factor: of the last learning rate, for the first trial of the
        next search; positive. Infinity starts at ``max_learning_rate``.
      max_learning_rate: upper limit of the learning rate (dimensionless).
      atol: absolute tolerance of the condition, in units of the loss.
      rtol: tolerance relative to the loss (dimensionless).
      store_grad: whether to keep the gradient at the accepted parameters for
        the next step. Costs a backward pass per step and one copy of the
        parameters.
      verbose: whether to print when a search fails.

    Raises:
      TypeError: ``wrt`` is not given.
      ValueError: ``wrt`` selects nothing, ``tx`` contains a line search, or a
        factor is out of range.
    """
    _search.check_range('max_backtracking_steps', max_backtracking_steps, 0)
    _search.check_range('decrease_factor', decrease_factor, 0.0, 1.0)
    _search.check_range('increase_factor', increase_factor, 0.0)
    _search.check_range('max_learning_rate', max_learning_rate, 0.0)
    linesearch = optax.scale_by_backtracking_linesearch(
      max_backtracking_steps=max_backtracking_steps,
      slope_rtol=slope_rtol,
      decrease_factor=decrease_factor,
      increase_factor=increase_factor,
      max_learning_rate=max_learning_rate,
      atol=atol,
      rtol=rtol,
      store_grad=store_grad,
      verbose=verbose,
    )
    self._start(
      model,
      tx,
      linesearch,
      wrt=wrt,
      graph=graph,
      is_failure=lambda state, *_: ~(state.info.decrease_error <= atol),
      # A search starts at ``increase_factor`` times what is stored.
      restart_learning_rate=max_learning_rate / min(increase_factor, 1.0),
    )
