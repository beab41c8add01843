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
"""Whole fits: one call, one compilation, no dispatch per step."""
from __future__ import annotations

import contextlib
import operator
import signal
import threading
import time
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from rich import progress as rich_progress

from flax.nnx.optimizers import _loop
from flax.nnx.training import eager
from flax.nnx.training.optimizer import Optimizer

M = tp.TypeVar('M')

_SECONDS_PER_CHUNK = 0.3  # about how often the progress bar moves


class MinimizeResult(tp.NamedTuple):
  """How :func:`minimize` ended; arrays, all scalar.

  Example usage::

    >>> import optax
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    >>> loss_fn = lambda model: (model.kernel ** 2).sum()
    >>> result = nnx.optimizers.minimize(loss_fn, model, optimizer)
    >>> int(result.num_steps), bool(result.converged)
    (1, True)

  Attributes:
    value: loss at the final parameters.
    grad_norm: Euclidean norm of its gradient there.
    num_steps: number of updates made by this call, ``int32``.
    converged: whether ``grad_norm`` is at most ``gtol``.
  """

  value: jax.Array
  grad_norm: jax.Array
  num_steps: jax.Array
  converged: jax.Array


def minimize(
  loss_fn: tp.Callable[..., tp.Any],
  model: M,
  optimizer: Optimizer[M],
  *args: tp.Any,
  max_steps: int = 500,
  gtol: float | jax.Array = 1e-5,
  has_aux: bool = False,
  progress: bool = False,
  **kwargs: tp.Any,
) -> MinimizeResult:
  """Updates ``model`` until the gradient is small, on the device.

  Each step is that of :meth:`~flax.nnx.Optimizer.value_and_update` on the same
  data; all of them run in one ``jax.lax.while_loop``. If the last search stored
  value and gradient, and the loss leaves the model's other state alone, they
  are used again, which saves a forward and a backward pass per step.

  Example usage::

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    ...
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> y = jnp.array([[1.0], [3.0], [0.0], [2.0]])  # 1 + 2 x0 - x1
    >>> loss_fn = lambda model, x, y: ((model(x) - y) ** 2).mean()
    ...
    >>> optimizer = nnx.optimizers.LBFGS(model, wrt=nnx.Param)
    >>> result = nnx.optimizers.minimize(loss_fn, model, optimizer, x, y)
    >>> bool(result.converged)
    True
    >>> [[round(float(w), 3)] for w in model.kernel[...].ravel()]
    [[2.0], [-1.0]]

  It stops when the Euclidean norm of the gradient is at most ``gtol``, after
  ``max_steps`` updates, when value or gradient are not finite, or after 15
  failed line searches in a row. (``tol`` and ``maxiter`` are what other
  libraries call the first two.) A further call goes on from where this one
  ended.

  Works within ``jit``, and within ``vmap``, where each member of an ensemble
  stops by itself. Otherwise it is compiled once for ``loss_fn`` and the shapes
  of the arguments; arguments that are no arrays keep their Python values.

  Args:
    loss_fn: function of a model, ``args`` and ``kwargs``; returns the loss, a
      real scalar, or (loss, aux) if ``has_aux``.
    model: a Module, whose parameters are updated in place. The rest of its
      state (batch statistics, rng counts) advances once per step.
    optimizer: any :class:`~flax.nnx.Optimizer` made for ``model``.
    *args: further arguments of ``loss_fn``.
    max_steps: number of updates, at most.
    gtol: norm of the gradient at which to stop, in units of the loss per unit
      of the parameters; a scalar.
    has_aux: see ``loss_fn``; ``aux`` is not used.
    progress: whether to show a progress bar with step, value and gradient norm.
      The fit is then run in chunks, and interrupting it (Ctrl-C) leaves model
      and optimizer as after the last one.
    **kwargs: further keyword arguments of ``loss_fn``.

  Returns:
    A :class:`MinimizeResult`.

  Raises:
    ValueError: ``wrt`` of the optimizer selects nothing, ``max_steps`` or
      ``gtol`` is negative, the loss is not a scalar, it changes the structure
      of the model, or ``progress`` is set within a transformation.
    TypeError: ``max_steps`` is not an integer, or the loss not a real number.
  """
  if not isinstance(optimizer, Optimizer):
    raise TypeError(
      'minimize(loss_fn, model, optimizer, ...) needs an nnx.Optimizer in '
      f'third place, got {type(optimizer).__name__}. Make one of an optax '
      'transformation: nnx.Optimizer(model, tx, wrt=nnx.Param).'
    )
  max_steps, gtol = _check(max_steps, gtol)
  if progress and not eager.is_eager():
    raise ValueError(
      'minimize(progress=True) shows its bar from outside the compiled loop, '
      'so it cannot be used within jit, vmap or another transformation. Use '
      'progress=False there.'
    )
  step = eager.Step(_loop.run, loss_fn, graph=optimizer.graph, frozen=True)

  def advance(num_steps, failures=0) -> tuple[MinimizeResult, jax.Array]:
    value, grad_norm, steps, failures = step(
      optimizer, model, args, kwargs, has_aux, np.int32(num_steps), gtol,
      np.asarray(failures, np.int32),
    )  # fmt: skip
    result = MinimizeResult(value, grad_norm, steps, grad_norm <= gtol)
    return result, failures

  if not progress:
    return advance(max_steps)[0]
  return _in_chunks(advance, max_steps)


def _check(max_steps: tp.Any, gtol: tp.Any) -> tuple[int, tp.Any]:
  try:
    max_steps = operator.index(max_steps)
  except (TypeError, jax.errors.JAXTypeError):
    raise TypeError(
      f'`max_steps` must be a Python integer, got {max_steps!r}.'
    ) from None
  if max_steps < 0:
    raise ValueError(f'`max_steps` must be at least 0, got {max_steps}.')
  if jnp.shape(gtol) != ():
    raise ValueError(f'`gtol` must be a scalar, got shape {jnp.shape(gtol)}.')
  if not isinstance(gtol, jax.Array):
    if not gtol >= 0:
      raise ValueError(f'`gtol` must be at least 0, got {gtol!r}.')
    gtol = np.asarray(gtol, jnp.result_type(float))
  return max_steps, gtol


@contextlib.contextmanager
def _interrupts_deferred() -> tp.Iterator[None]:
  """Lets Ctrl-C wait for the end of the block, so that it is not half done."""
  pending: list[tp.Any] = []
  handler = signal.getsignal(signal.SIGINT)
  in_main = threading.current_thread() is threading.main_thread()
  if not in_main or not callable(handler):
    yield
    return
  signal.signal(signal.SIGINT, lambda *received: pending.append(received))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
  if pending:
    handler(*pending[0])


def _in_chunks(
  advance: tp.Callable[..., tuple[MinimizeResult, jax.Array]], max_steps: int
) -> MinimizeResult:
  columns = (
    rich_progress.TextColumn('minimize'),
    rich_progress.BarColumn(),
    rich_progress.MofNCompleteColumn(),
    rich_progress.TextColumn('value {task.fields[value]}'),
    rich_progress.TextColumn('gradient norm {task.fields[grad_norm]}'),
    rich_progress.TimeElapsedColumn(),
  )
  done, chunk, failures = 0, 1, 0
  with rich_progress.Progress(*columns) as bar:
    task = bar.add_task('', total=max_steps, value='-', grad_norm='-')
    while True:
      start = time.perf_counter()
      num_steps = min(chunk, max_steps - done)
      with _interrupts_deferred():
        result, failures = jax.block_until_ready(advance(num_steps, failures))
      seconds = time.perf_counter() - start
      done += int(result.num_steps)
      bar.update(
        task, completed=done, value=f'{float(result.value):.6g}',
        grad_norm=f'{float(result.grad_norm):.3g}',
      )  # fmt: skip
      # The first chunk compiles, and tells nothing.
      chunk = 2 * chunk if seconds < _SECONDS_PER_CHUNK else chunk
      stopped = int(result.num_steps) < num_steps
      if done >= max_steps or stopped or bool(result.converged):
        return result._replace(num_steps=jnp.asarray(done, jnp.int32))
