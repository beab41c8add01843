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
"""The zoom line search (strong Wolfe conditions)."""
from __future__ import annotations

import typing as tp

import jax.numpy as jnp
import optax

from flax.nnx import filterlib
from flax.nnx.optimizers import _search
from flax.typing import MISSING, Missing

M = tp.TypeVar('M')


@tp.final
class ZoomLinesearch(_search.LinesearchOptimizer[M]):
  r"""Steps along a descent direction to where the slope has flattened, too.

  With parameters :math:`w`, loss :math:`f` and the direction :math:`u` that
  ``tx`` makes of the gradient, the update is :math:`\eta u`. The learning rate
  :math:`\eta` satisfies the strong Wolfe conditions: sufficient decrease,

  .. math::
    f(w + \eta u) \leq f(w)
    + \mathrm{slope\_rtol} \; \eta \langle u, \nabla f(w) \rangle
    + \mathrm{tol},

  and small curvature,

  .. math::
    |\langle u, \nabla f(w + \eta u) \rangle| \leq
    \mathrm{curv\_rtol} \; |\langle u, \nabla f(w) \rangle| + \mathrm{tol}.

  Each trial costs a forward and a backward pass. The search is
  ``optax.scale_by_zoom_linesearch``; unlike plain optax it recovers from a
  failed search, and takes losses of any floating dtype.

  Example usage::

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.optimizers.ZoomLinesearch(model, wrt=nnx.Param)
    >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
    ...
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   return optimizer.value_and_update(loss_fn, from_state=True)(model, x)
    ...
    >>> x = jnp.ones((4, 2))
    >>> losses = [train_step(model, optimizer, x) for _ in range(3)]
    >>> assert losses[2] < losses[0]

  A search that fails leaves the parameters as they are; ``failed`` of
  :attr:`linesearch_info` is set, and the next one starts from
  ``max_learning_rate``, or from 1 if there is no maximum.

  Reference: Nocedal and Wright, *Numerical optimization*, 2nd ed., algorithms
  3.5 and 3.6; Hager and Zhang, `Algorithm 851: CG_DESCENT
  <https://doi.org/10.1145/1132973.1132979>`_, 2006.
  """

  def __init__(
    self,
    model: M,
    tx: optax.GradientTransformation = optax.sgd(1.0),
    *,
    wrt: filterlib.Filter | Missing = MISSING,
    graph: bool | None = None,
    max_linesearch_steps: int = 20,
    max_learning_rate: float | None = None,
    tol: float = 0.0,
    increase_factor: float = 2.0,
    slope_rtol: float = 1e-4,
    curv_rtol: float = 0.9,
    approx_dec_rtol: float | None = 1e-6,
    stepsize_precision: float = 1e-5,
    initial_guess_strategy: str = 'keep',
    verbose: bool = False,
  ):
    """Starts the search and the state of ``tx``.

    Args:
      model: a Module (or a tuple of Modules, or a State). It is not kept.
      tx: gives the direction, and its length at learning rate 1.
      wrt: filter of the Variables to optimize, as in
        :class:`~flax.nnx.Optimizer`.
      graph: graph mode, as in :class:`~flax.nnx.Optimizer`.
      max_linesearch_steps: evaluations of loss and gradient, at most.
      max_learning_rate: upper limit of the learning rate (dimensionless).
      tol: tolerance of both conditions, in units of the loss.
      increase_factor: of the trial learning rate, until an interval is found
        that holds an acceptable one (dimensionless).
      slope_rtol: share of the decrease promised by the slope that is required.
      curv_rtol: share of the slope that may remain.
      approx_dec_rtol: tolerance, relative to the loss, of the approximate
        decrease condition that helps near a minimum; ``None`` turns it off.
      stepsize_precision: length of an interval too short to be searched.
      initial_guess_strategy: ``'keep'`` to start from the last learning rate,
        ``'one'`` to start from 1.
      verbose: whether to print when a search fails.

    Raises:
      TypeError: ``wrt`` is not given.
      ValueError: ``wrt`` selects nothing, ``tx`` contains a line search, or an
        argument is out of range.
    """
    _search.check_range('max_linesearch_steps', max_linesearch_steps, 1)
    _search.check_range('increase_factor', increase_factor, 1.0)
    if max_learning_rate is not None:
      _search.check_range('max_learning_rate', max_learning_rate, 0.0)
    if initial_guess_strategy not in ('keep', 'one'):
      raise ValueError(
        "`initial_guess_strategy` must be 'keep' or 'one', got "
        f'{initial_guess_strategy!r}.'
      )
    linesearch = optax.scale_by_zoom_linesearch(
      max_linesearch_steps=max_linesearch_steps,
      max_learning_rate=max_learning_rate,
      tol=tol,
      increase_factor=increase_factor,
      slope_rtol=slope_rtol,
      curv_rtol=curv_rtol,
      approx_dec_rtol=approx_dec_rtol,
      stepsize_precision=stepsize_precision,
      initial_guess_strategy=initial_guess_strategy,
      verbose=verbose,
    )
    self._start(
      model,
      tx,
      linesearch,
      wrt=wrt,
      graph=graph,
      is_failure=zoom_failure(tol, slope_rtol, approx_dec_rtol),
      restart_learning_rate=max_learning_rate or 1.0,
    )


def zoom_failure(tol=0.0, slope_rtol=1e-4, approx_dec_rtol=1e-6):
  """Tells from the state of a zoom line search whether it failed.

  A search that ran out of steps may still have found a learning rate with
  sufficient decrease and fallen back on it, without telling.
  """

  def is_failure(state, value, slope):
    rate = state.learning_rate
    decreased = state.value <= value + slope_rtol * rate * slope + tol
    if approx_dec_rtol is not None:
      decreased |= state.value <= value + approx_dec_rtol * jnp.abs(value)
    accepted = (state.info.decrease_error <= tol) | decreased
    return ~((rate > 0) & jnp.isfinite(state.value) & accepted)

  return is_failure
