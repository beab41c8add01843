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
"""Which extra arguments reach an optax transformation, and in which form.

``optax.GradientTransformationExtraArgs`` take keyword arguments besides the
gradients; other transformations take none. ``nnx.Optimizer`` serves both from
one call, so it has to know which ones a transformation accepts.
"""
from __future__ import annotations

import inspect
import typing as tp

import jax
import jax.numpy as jnp
import optax

from flax.nnx import graphlib
from flax.nnx.training.params_function import is_callback, params_function
from flax.nnx.training.snapshot import Snapshot

LINESEARCH_STATES = (
  optax.ScaleByBacktrackingLinesearchState,
  optax.ScaleByZoomLinesearchState,
)


class Accepted(tp.NamedTuple):
  """Keyword arguments that a function names, and whether it takes others."""

  names: frozenset[str]
  others: bool
  reserved: frozenset[str] = frozenset()  # what it calls its first arguments

  def __contains__(self, name: object) -> bool:
    return name in self.names or (self.others and name not in self.reserved)


def accepted(
  function: tp.Callable[..., tp.Any],
  *,
  num_positional: int,
  without_signature: bool = False,
) -> Accepted:
  """Which keyword arguments ``function`` takes.

  Args:
    function: any callable.
    num_positional: how many arguments it gets by position.
    without_signature: whether a callable that has no signature takes any.
  """
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except (TypeError, ValueError):  # a callable without a signature
    return Accepted(frozenset(), without_signature)
  first = [
    p for p in parameters[:num_positional] if p.kind is p.POSITIONAL_OR_KEYWORD
  ]
  named = [
    p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  return Accepted(
    names=frozenset(p.name for p in named if p not in first),
    others=any(p.kind is p.VAR_KEYWORD for p in parameters),
    reserved=frozenset(p.name for p in first),
  )


def accepted_by(tx: optax.GradientTransformation) -> Accepted:
  """Which extra arguments ``tx.update(updates, state, params)`` takes."""
  return accepted(
    tx.update,
    num_positional=3,
    without_signature=isinstance(tx, optax.GradientTransformationExtraArgs),
  )


def accepted_names(tx: optax.GradientTransformation) -> frozenset[str] | None:
  """Names of the extra arguments that ``tx.update`` takes.

  The signature decides, since ``optax.MultiSteps`` forwards extra arguments
  without being a ``GradientTransformationExtraArgs``, while some
  ``GradientTransformationExtraArgs`` (``optax.contrib.sam``) take only a few.

  Example usage::

    >>> from flax.nnx.training.extra_args import accepted_names
    >>> import optax
    ...
    >>> accepted_names(optax.scale_by_adam())
    frozenset()
    >>> accepted_names(optax.lbfgs()) is None
    True

  Args:
    tx: an optax transformation, or an object with its methods.

  Returns:
    A set of names, empty if ``tx`` takes no extra arguments, or ``None`` if it
    takes any.
  """
  takes = accepted_by(tx)
  return None if takes.others else takes.names


def to_params_args(
  kwargs: tp.Mapping[str, tp.Any],
  *,
  model: tp.Any,
  grads: tp.Any,
  tx: optax.GradientTransformation,
  wrt: tp.Any,
  graph: bool | None = None,
) -> dict[str, tp.Any]:
  """Extra arguments in terms of the model, in the terms of ``tx.update``.

  Args:
    kwargs: extra arguments as the user gave them.
    model: the model around which callbacks put their candidate parameters.
    grads: pure gradient, shaped like the parameters, handed on as ``grad`` if
      ``tx`` may need it and ``kwargs`` has none.
    tx: the transformation that gets the arguments.
    wrt: filter of the parameters.
    graph: graph mode, tree mode, or that of the context.

  Returns:
    A new dict with the arguments that ``tx`` accepts: callbacks are functions
    of the parameters, everything else is free of Variables.

  Raises:
    ValueError: ``kwargs['grad']`` lacks some parameter.
  """
  takes = accepted_by(tx)
  kwargs = {name: v for name, v in kwargs.items() if name in takes}
  # Nothing else in optax reads ``grad``, and some transformations raise on it.
  needs_grad = 'grad' in takes.names or kwargs.get('value_fn') is not None
  if needs_grad and 'grad' in takes and kwargs.get('grad') is None:
    kwargs['grad'] = grads
  if not kwargs:
    return kwargs
  snapshot = Snapshot(model, wrt, graph=graph)

  def convert(name, value):
    if name == 'grad' and value is not None and value is not grads:
      return snapshot.align(value, 'grad')
    if is_callback(value):
      return params_function(value, snapshot, name=name)
    return graphlib.as_pure(value)

  return {name: convert(name, value) for name, value in kwargs.items()}


def is_overridden(optimizer: tp.Any, method: str) -> bool:
  """Whether a class of the user's own replaces a method of the optimizer."""
  return not getattr(type(optimizer), method).__module__.startswith('flax.')


def find_states(tree: tp.Any, kinds: tp.Any) -> list[tp.Any]:
  """All subtrees of the given type or types, outermost first."""
  is_kind = lambda x: isinstance(x, kinds)
  return [x for x in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(x)]


def linesearch_states(opt_state: tp.Any) -> list[tp.Any]:
  """The states of all line searches of optax within an optax state.

  They are told by their type, since parameters may have the names ``value``
  and ``grad`` too.
  """
  return find_states(opt_state, LINESEARCH_STATES)


def check_linesearch_args(extra_args: dict[str, tp.Any]) -> None:
  """Checks what an optax line search needs, before it is called.

  Args:
    extra_args: the keyword arguments meant for ``tx.update``.

  Raises:
    TypeError: ``value`` or ``value_fn`` is missing or ``None``, or ``value`` is
      not a floating-point number.
    ValueError: ``value`` is not a scalar.
  """
  missing = [k for k in ('value', 'value_fn') if extra_args.get(k) is None]
  if missing:
    raise TypeError(
      f'The line search in `tx` needs {" and ".join(missing)}, not given (or '
      'None) in this call of Optimizer.update. Pass the loss and the function '
      'that computes it: optimizer.update(model, grads, value=loss, '
      'value_fn=lambda model: loss_fn(model, x, y)).'
    )
  value = extra_args['value']
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if shape != ():
    raise ValueError(
      f'`value` must be the loss, a scalar, but it has shape {shape}. Reduce '
      'it, for example with jnp.mean, in the loss function.'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f'`value` must be a floating-point scalar, but its dtype is {dtype}, '
      'with which optax would compare losses in that dtype. Compute the loss '
      'in floating point, or pass value=jnp.asarray(loss, jnp.float32).'
    )
