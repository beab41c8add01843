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
"""L-BFGS with a line search."""
from __future__ import annotations

import typing as tp

import optax

from flax.nnx import filterlib
from flax.nnx.optimizers import _search
from flax.nnx.optimizers.zoom import zoom_failure
from flax.typing import MISSING, Missing

M = tp.TypeVar('M')


@tp.final
class LBFGS(_search.LinesearchOptimizer[M]):
  r"""Limited-memory BFGS: a line search along a quasi-Newton direction.

  The gradient is multiplied with an approximation of the inverse Hessian made
  of the last ``memory_size`` differences of parameters and gradients. Meant
  for losses without noise, on the full data set. The state takes about
  ``2 * memory_size + 3`` times the memory of the parameters.

  Step by step it equals ``optax.lbfgs``; unlike plain optax it recovers from a
  failed search, and takes losses of any floating dtype.

  Example usage::

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
    ...
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   return optimizer.value_and_update(loss_fn, from_state=True)(model, x)
    ...
    >>> x = jnp.ones((4, 2))
    >>> losses = [train_step(model, optimizer, x) for _ in range(3)]
    >>> assert losses[2] < losses[0]

  Reference: Liu and Nocedal, `On the limited memory BFGS method for large scale
  optimization <https://doi.org/10.1007/BF01589116>`_, 1989; Nocedal and Wright,
  *Numerical optimization*, 2nd ed., algorithms 7.4 and 7.5.
  """

  def __init__(
    self,
    model: M,
    *,
    wrt: filterlib.Filter | Missing = MISSING,
    graph: bool | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: optax.GradientTransformationExtraArgs
    | None = optax.scale_by_zoom_linesearch(
      max_linesearch_steps=20, initial_guess_strategy='one'
    ),
  ):
    """Starts the search and the memory.

    Args:
      model: a Module (or a tuple of Modules, or a State). It is not kept.
      wrt: filter of the Variables to optimize, as in
        :class:`~flax.nnx.Optimizer`.
      graph: graph mode, as in :class:`~flax.nnx.Optimizer`.
      learning_rate: factor of the direction before the search, a number or a
        schedule (dimensionless); ``None`` means 1.
      memory_size: number of differences to keep, at least 1.
      scale_init_precond: whether to scale the first approximation of the
        inverse Hessian, so that the learning rate is of order 1.
      linesearch: a line search of optax.

    Raises:
      TypeError: ``wrt`` is not given.
      ValueError: ``wrt`` selects nothing, ``memory_size`` is not positive, or
        ``linesearch`` is none.
    """
    _search.check_range('memory_size', memory_size, 1)
    direction = optax.lbfgs(
      learning_rate, memory_size, scale_init_precond, linesearch=None
    )
    self._start(
      model,
      direction,
      linesearch,
      wrt=wrt,
      graph=graph,
      is_failure=zoom_failure(),
      restart_learning_rate=1.0,
    )
