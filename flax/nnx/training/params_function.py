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
"""Functions of a model, seen by optax as functions of its parameters.

Optax calls its callbacks (``value_fn``, ``obj_fn``, ``grad_fn``) with a tree of
candidate parameters, NNX users write functions of a Module: ``params_function``
translates between the two.
"""
from __future__ import annotations

import functools
import inspect
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from flax.nnx import graphlib, statelib, variablelib
from flax.nnx.training.snapshot import Snapshot, is_masked, is_stateful

# What these callbacks return is a loss, so it has to be one real number.
SCALAR_CALLBACKS = ('value_fn', 'obj_fn')
_ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def is_callback(x: tp.Any) -> bool:
  """Whether an extra argument is a function for optax to call.

  Modules and Variables may be callable too, but they are data.
  """
  return (
    callable(x)
    and not isinstance(x, type)
    and not is_stateful(x)
    and not isinstance(x, jax.Array)
    and not variablelib.is_array_ref(x)
  )


def _wants_state(fn: tp.Callable[..., tp.Any]) -> bool:
  """Whether the first parameter of ``fn`` is annotated as ``nnx.State``."""
  try:
    signature = inspect.signature(fn, eval_str=True)
  except Exception:  # an annotation that does not evaluate, a builtin, ...
    try:
      signature = inspect.signature(fn)
    except (TypeError, ValueError):
      return False
  first = next(iter(signature.parameters.values()), None)
  if first is None:
    return False
  annotation = tp.get_origin(first.annotation) or first.annotation
  if isinstance(annotation, str):
    return annotation.split('[')[0].split('.')[-1] == 'State'
  return isinstance(annotation, type) and issubclass(
    annotation, statelib.State
  )


def check_scalar(result: tp.Any, name: str) -> tp.Any:
  where = f'`{name}` must return the loss, one real number (a scalar), but it'
  if isinstance(result, (tuple, list)):
    raise TypeError(
      f'{where} returned a {type(result).__name__} of {len(result)}. '
      + (
        'For a pair (loss, aux) set has_aux=True.'
        if name == 'loss_fn'
        else 'Return the loss alone: '
        f'{name}=lambda model: loss_fn(model, ...)[0].'
      )
    )
  if not isinstance(result, _ARRAY_LIKE):
    raise TypeError(f'{where} returned {type(result).__name__}: {result!r}.')
  shape, dtype = jnp.shape(result), jnp.result_type(result)
  if shape != ():
    raise ValueError(
      f'{where} returned an array of shape {shape}. Reduce it, for example '
      'with jnp.mean.'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f'{where} returned dtype {dtype}. Return a floating-point value.'
    )
  return result


def params_function(
  fn: tp.Callable[..., tp.Any],
  snapshot: Snapshot[tp.Any],
  *,
  name: str | None = None,
) -> tp.Callable[..., tp.Any]:
  """Turns a function of the model into a function of the parameters.

  Example usage::

    >>> from flax import nnx
    >>> from flax.nnx.training.params_function import params_function
    >>> from flax.nnx.training.snapshot import Snapshot
    >>> import jax, jax.numpy as jnp
    ...
    >>> model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    >>> snapshot = Snapshot(model, nnx.Param)
    >>> value_fn = params_function(lambda m: m(jnp.ones(2)).sum(), snapshot)
    >>> jax.grad(value_fn)(snapshot.params)['kernel'].shape
    (2, 3)

  The function is called with a model that holds the given parameters and,
  besides them, what the model held when this was called; it may change that
  model at will. If its first parameter is annotated as ``nnx.State`` it
  gets the pure State instead, and so does a function that raises for the model
  but not for the State. Other arguments pass through. The signature stays
  (optax routes keyword arguments by its names), and what comes back is made of
  arrays.

  Args:
    fn: function of a model, and of other arguments.
    snapshot: the model around which parameters are put.
    name: the keyword under which ``fn`` was given; a ``value_fn`` or
      ``obj_fn`` must return a real scalar.

  Returns:
    A function of a tree shaped like ``snapshot.params``, in which
    ``optax.MaskedNode`` stands for the current parameters. A first argument of
    any other shape is handed on as it is.

  Raises:
    TypeError, ValueError: by the returned function, if a ``value_fn`` or
      ``obj_fn`` does not return a real scalar.
  """
  snapshot.freeze()
  wants_state: bool | None = True if _wants_state(fn) else None

  def call(trial, *args, **kwargs):
    nonlocal wants_state
    if wants_state:
      return fn(trial, *args, **kwargs)
    if wants_state is False:
      return fn(snapshot.merge(trial), *args, **kwargs)
    try:
      result = fn(snapshot.merge(trial), *args, **kwargs)
      wants_state = False
    except Exception as model_error:
      try:
        result = fn(trial, *args, **kwargs)
      except Exception:
        # The model is what the function is meant for: report that failure.
        raise model_error from None
      wants_state = True
    return result

  @functools.wraps(fn)
  def of_params(params, *args, **kwargs):
    trial = snapshot.fill(params)
    if trial is None:
      result = graphlib.as_pure(fn(params, *args, **kwargs))
    else:
      result = snapshot.purify(call(trial, *args, **kwargs))
      if snapshot.fill(result) is not None:
        result = jax.tree.map(
          lambda t, r: t if is_masked(t) else r,
          params,
          result,
          is_leaf=is_masked,
        )
    return check_scalar(result, name) if name in SCALAR_CALLBACKS else result

  return of_params
