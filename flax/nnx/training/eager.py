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
"""Eager steps that compile once, not at every call.

Optax runs a line search in a ``jax.lax.while_loop``; called eagerly, with a new
function each time, it is traced and compiled each time. Here the whole step is
compiled, and used again as long as it means the same. Whatever cannot be
compiled, or may have changed unnoticed, runs as it is.
"""
from __future__ import annotations

import collections
import functools
import threading
import types
import typing as tp
import weakref

import jax
import numpy as np

from flax.nnx import graphlib, tracers, variablelib
from flax.nnx.pytreelib import Pytree
from flax.nnx.training.captures import NotConstant, key_of, root_code
from flax.nnx.training.snapshot import is_stateful

# Compiled steps that are kept, the least recently used goes first.
MAX_COMPILED = 32
# Constants that change from call to call cost a compilation each; after so many
# in a row the same ones have to come twice.
MAX_MISSES = 3


class _NotCompiled(Exception):
  """This call has to run as it is."""


@jax.tree_util.register_static
class _Constant:
  """A value that stays out of tracing, with the key that identifies it."""

  def __init__(self, value: tp.Any, key: tp.Hashable):
    self.value = value
    self.key = key

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Constant) and self.key == other.key

  def __hash__(self) -> int:
    return hash(self.key)


class _Index(tp.NamedTuple):
  """Place of a Module among those that were taken out of the arguments."""

  index: int


class _Misses:
  """Calls of one piece of code in a row for which nothing was compiled."""

  def __init__(self):
    self.count = 0
    self.last = 0


# ``None`` where compiling failed and running did not.
_COMPILED: collections.OrderedDict[tp.Hashable, tp.Any]
_COMPILED = collections.OrderedDict()
_MISSES: weakref.WeakKeyDictionary[types.CodeType, _Misses]
_MISSES = weakref.WeakKeyDictionary()


@functools.cache
def _eager_trace() -> tp.Any:
  """The trace state outside of all transformations: that of a new thread."""
  found = []
  thread = threading.Thread(
    target=lambda: found.append(tracers.current_jax_trace())
  )
  thread.start()
  thread.join()
  return found[0]


def is_eager() -> bool:
  """Whether no transformation (jit, vmap, grad, scan, ...) is under way."""
  return tracers.current_jax_trace() == _eager_trace()


def _is_array(x: tp.Any) -> bool:
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, variablelib.Variable)


def _same(a: tp.Any, b: tp.Any) -> bool:
  old, new = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(old) == len(new) and all(x is y for x, y in zip(old, new))


def _split(nodes, graph):
  graphdef, state = graphlib.split(nodes, graph=graph)
  holders, treedef = jax.tree.flatten(state, is_leaf=_is_variable)
  return graphdef, treedef, holders


def _pack(result: tp.Any) -> tp.Any:
  """Takes what is no array out of an output of ``jax.jit``."""

  def pack(x):
    if is_stateful(x):
      raise _NotCompiled
    return x if _is_array(x) else _Constant(x, id(x))

  return jax.tree.map(pack, result, is_leaf=is_stateful)


def _unpack(result: tp.Any) -> tp.Any:
  is_constant = lambda x: isinstance(x, _Constant)
  return jax.tree.map(
    lambda x: x.value if is_constant(x) else x, result, is_leaf=is_constant
  )


def _take_apart(args: tp.Any) -> tuple[tp.Any, list[tp.Any], tp.Any]:
  """Modules, and leaves and structure of what else there is."""
  leaves, treedef = jax.tree.flatten(
    args, is_leaf=lambda x: x is None or is_stateful(x)
  )
  nodes: list[tp.Any] = []

  def take(leaf):
    if isinstance(leaf, (Pytree, variablelib.Variable)):
      nodes.append(leaf)
      index = _Index(len(nodes) - 1)
      return _Constant(index, index)
    return leaf if _is_array(leaf) else _Constant(leaf, key_of(leaf))

  taken = [take(leaf) for leaf in leaves]
  return tuple(nodes), taken, treedef


def _put_together(nodes: tp.Any, leaves: list[tp.Any], treedef: tp.Any):
  return treedef.unflatten(
    nodes[leaf.index] if isinstance(leaf, _Index) else leaf
    for leaf in _unpack(leaves)
  )


def _run(function, graph, graphdef, treedefs, values, leaves):
  """The traced part: the step on copies of the Modules."""
  body, fn = function.value
  treedef, args_treedef = treedefs
  nodes = graphlib.merge(graphdef, treedef.unflatten(values))
  result = body(fn, *_put_together(nodes, leaves, args_treedef))
  new_graphdef, new_treedef, holders = _split(nodes, graph)
  new_values = [graphlib.as_pure(holder) for holder in holders]
  if (new_graphdef, new_treedef) != (graphdef, treedef) or (
    jax.tree.structure(new_values) != jax.tree.structure(values)
  ):
    raise _NotCompiled  # new Variables, other static attributes
  changed = {
    i: new
    for i, (old, new) in enumerate(zip(values, new_values))
    if not _same(old, new)
  }
  return _pack(result), changed


def _laid_out_as(new: jax.Array, old: jax.Array) -> jax.Array:
  """``new`` sharded as ``old`` was, of which the compiler knows nothing."""
  sharding = getattr(old, 'sharding', None)
  if sharding is None or len(sharding.device_set) == 1:
    return new
  if new.sharding.is_equivalent_to(sharding, new.ndim):
    return new
  return jax.device_put(new, sharding)


class Step:
  """A function of the user within a step of ours, compiled where it can be.

  Args:
    body: a module-level function ``body(fn, *args)``, which may update Modules
      in ``args``.
    fn: function of the user that ``body`` calls.
    methods: other functions of the user that ``body`` calls.
    graph: graph mode in which Modules are taken apart.
    frozen: whether ``fn`` means the same in all calls of this object, whatever
      it captures.
  """

  def __init__(
    self,
    body: tp.Callable[..., tp.Any],
    fn: tp.Callable[..., tp.Any],
    *,
    methods: tuple[tp.Any, ...] = (),
    graph: bool | None = None,
    frozen: bool = False,
  ):
    self._body = body
    self._fn = fn
    self._methods = methods
    self._graph = graph
    self._frozen = frozen
    self._frozen_key: tp.Hashable = None
    self._cache: tp.Any = _COMPILED

  def __call__(self, *args: tp.Any) -> tp.Any:
    """``body(fn, *args)``; what is no array stays the Python object it is."""
    variant, failed = None, False
    if is_eager() and not jax.config.jax_disable_jit:
      try:
        function = _Constant((self._body, self._fn), self._key())
        nodes, leaves, treedef = _take_apart(args)
        constants = tuple(x for x in leaves if isinstance(x, _Constant))
        variant = (function, constants)
        jitted = self._jitted(variant)
      except (_NotCompiled, NotConstant, TypeError, RecursionError):
        jitted = None
      if jitted is not None:
        try:
          return self._call(jitted, function, nodes, leaves, treedef)
        except Exception:
          # If it is a mistake in the loss, the step itself raises below.
          failed = True
    result = self._body(self._fn, *args)
    if failed and variant in self._cache:
      self._cache[variant] = None
    return result

  def _key(self) -> tp.Hashable:
    if self._frozen and self._frozen_key is not None:
      return self._frozen_key
    try:
      key = self._body, key_of((self._fn, *self._methods))
    except NotConstant:
      if not self._frozen:
        raise
      # Meant for this object alone, so that it may not be found by another.
      self._cache = collections.OrderedDict()
      key = self._body, None
    self._frozen_key = key
    return key

  def _jitted(self, variant: tp.Hashable) -> tp.Any:
    """The compiled function for a variant, or a new one to be compiled."""
    if variant not in self._cache:
      self._count_miss(variant)
      self._cache[variant] = jax.jit(
        functools.partial(_run), static_argnums=(0, 1, 2, 3)
      )
      if len(self._cache) > MAX_COMPILED:
        self._cache.popitem(last=False)
    elif not self._frozen:
      _MISSES.pop(root_code(self._fn), None)
    self._cache.move_to_end(variant)
    if self._cache[variant] is None:
      raise _NotCompiled
    return self._cache[variant]

  def _count_miss(self, variant: tp.Hashable) -> None:
    if self._frozen:
      return
    misses = _MISSES.setdefault(root_code(self._fn), _Misses())
    misses.count += 1
    if misses.count > MAX_MISSES and misses.last != hash(variant):
      misses.last = hash(variant)
      raise _NotCompiled

  def _call(self, jitted, function, nodes, leaves, args_treedef):
    graphdef, treedef, holders = _split(nodes, self._graph)
    values = [graphlib.as_pure(holder) for holder in holders]
    if not all(map(_is_variable, holders)) or any(
      isinstance(x, jax.core.Tracer) or variablelib.is_array_ref(x)
      for x in jax.tree.leaves((values, leaves))
    ):
      raise _NotCompiled
    result, changed = jitted(
      function, self._graph, graphdef, (treedef, args_treedef), values, leaves
    )
    for i, new in changed.items():
      graphlib.update(holders[i], jax.tree.map(_laid_out_as, new, values[i]))
    return _unpack(result)
