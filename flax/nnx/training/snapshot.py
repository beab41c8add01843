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
"""A model remembered at one moment, to be rebuilt around other parameters."""
from __future__ import annotations

import functools
import typing as tp

import jax
import optax

from flax.nnx import filterlib, graphlib, statelib, variablelib
from flax.nnx.pytreelib import Pytree

M = tp.TypeVar('M')
Path = tuple[tp.Any, ...]


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, variablelib.Variable)


def is_masked(x: tp.Any) -> bool:
  return isinstance(x, optax.MaskedNode)


def is_stateful(x: tp.Any) -> bool:
  kinds = (statelib.State, graphlib.GraphState, Pytree, variablelib.Variable)
  return isinstance(x, kinds)


def _detached(leaf: tp.Any) -> tp.Any:
  """A leaf that shares nothing mutable with the model it comes from."""
  value = graphlib.as_pure(leaf)
  if not _is_variable(leaf):
    return value
  # Refs of a trial would be created inside optax's loops; plain values do.
  return leaf.copy(value, ref=False, hijax=False, _copy_ref=False)


def _cast_like(x: tp.Any, param: tp.Any) -> tp.Any:
  if isinstance(x, jax.Array) and isinstance(param, jax.Array):
    return x.astype(param.dtype)
  return x


def path_str(path: Path) -> str:
  """``('linear', 'kernel')`` as users write it: ``linear.kernel``."""
  return '.'.join(str(part) for part in path) or '<root>'


class Snapshot(tp.Generic[M]):
  """A model as it stands now, to be rebuilt around other parameters.

  Example usage::

    >>> from flax import nnx
    >>> from flax.nnx.training.snapshot import Snapshot
    >>> import jax
    ...
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> snapshot = Snapshot(model, nnx.Param)
    >>> halved = jax.tree.map(lambda x: x / 2, snapshot.params)
    >>> trial = snapshot.merge(halved)
    >>> bool((trial.kernel * 2 == model.kernel).all())
    True

  Args:
    model: a Module, or any graph node (a tuple of Modules, a State).
    wrt: filter that tells the parameters from the rest of the model.
    graph: graph mode (``True``), tree mode (``False``) or the mode of the
      current ``nnx.set_graph_mode`` context (``None``).

  Attributes:
    model: the model itself.
    variables: State of the model's own Variables that ``wrt`` selects.
    params: the same State with arrays in place of the Variables.
  """

  def __init__(
    self, model: M, wrt: filterlib.Filter, *, graph: bool | None = None
  ):
    self.model = model
    self.wrt = wrt
    self.graph = graph
    self._graphdef, self.variables, self._live_rest = graphlib.split(
      model, wrt, ..., graph=graph
    )
    self.params = graphlib.as_pure(self.variables)

  @functools.cached_property
  def _prototypes(self):
    return jax.tree.map(_detached, self.variables, is_leaf=_is_variable)

  @functools.cached_property
  def rest(self) -> tp.Any:
    """State of detached copies of all other Variables, as ``freeze`` read."""
    return jax.tree.map(_detached, self._live_rest, is_leaf=_is_variable)

  def freeze(self) -> Snapshot[M]:
    """Reads the whole model now, so that later changes do not show."""
    _ = self._prototypes, self.rest
    return self

  def merge(self, params: tp.Any) -> M:
    """The model around ``params``; nothing done to it reaches the original.

    Args:
      params: tree shaped like the ``params`` attribute.

    Returns:
      A new model of the same class. Its Variables belong to the trace in
      which ``merge`` was called, so it may be mutated there.
    """
    prototypes, treedef = jax.tree.flatten(
      self._prototypes, is_leaf=_is_variable
    )
    values = treedef.flatten_up_to(params)
    trial = [
      p.copy(v, _copy_ref=False) if _is_variable(p) else v
      for p, v in zip(prototypes, values)
    ]
    return graphlib.merge(
      self._graphdef, treedef.unflatten(trial), self.rest, copy=True
    )

  def find(self, tree: tp.Any) -> tuple[tp.Any, list[Path]]:
    """Picks from ``tree`` what belongs to the parameters.

    Args:
      tree: a State, a Module or a plain tree, of Variables or of arrays; it
        may hold more than the parameters.

    Returns:
      A pure tree shaped like ``params``, and the paths of the parameters for
      which ``tree`` has no entry.
    """
    try:
      entries = dict(
        statelib.to_flat_state(graphlib.state(tree, graph=self.graph))
      )
    except (TypeError, RuntimeError, AttributeError, IndexError):
      entries = {}  # not a tree with paths: None, a single array, ...
    missing: list[Path] = []

    def pick(path, _):
      if path in entries:
        return graphlib.as_pure(entries[path])
      missing.append(path)
      return None

    return statelib.map_state(pick, self.variables), missing

  def align(self, tree: tp.Any, name: str) -> tp.Any:
    """Like ``find``, for a tree that must have every parameter.

    Args:
      tree: see ``find``.
      name: what the user calls the tree, for the message.

    Raises:
      ValueError: ``tree`` has no entry for some parameter.
    """
    found, missing = self.find(tree)
    if missing:
      total = len(statelib.to_flat_state(self.variables))
      some = ', '.join(path_str(path) for path in missing[:5])
      some += ', ...' if len(missing) > 5 else ''
      raise ValueError(
        f'`{name}` has no entry for {len(missing)} of the {total} parameters '
        f'that wrt={self.wrt!r} selects: {some}. Differentiate with respect '
        'to the filter of the optimizer: '
        'nnx.grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt)).'
      )
    return found

  def fill(self, tree: tp.Any) -> tp.Any | None:
    """``tree`` with the current parameters in place of ``MaskedNode`` leaves.

    Leaves get the dtypes of the parameters: optax promotes candidates where
    parameters of several dtypes meet one learning rate.

    Returns:
      The filled tree, or ``None`` if ``tree`` is not shaped like ``params``.
    """
    if any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked))):
      try:
        tree = jax.tree.map(
          lambda t, p: p if is_masked(t) else t,
          tree,
          self.params,
          is_leaf=is_masked,
        )
      except ValueError:
        return None
    if jax.tree.structure(tree) != jax.tree.structure(self.params):
      return None
    return jax.tree.map(_cast_like, tree, self.params)

  def purify(self, result: tp.Any) -> tp.Any:
    """What a callback returned, as optax wants it: arrays only.

    A State or Module that holds every parameter (``nnx.grad`` returns one)
    becomes a tree shaped like ``params``.
    """

    def pure(x):
      if is_stateful(x) and not _is_variable(x):
        found, missing = self.find(x)
        if not missing:
          return found
      return graphlib.as_pure(x)

    return jax.tree.map(pure, result, is_leaf=is_stateful)
