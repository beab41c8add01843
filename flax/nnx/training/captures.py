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
"""What a function means, as a key that tells whether it has changed.

A compiled function keeps the values that it read while it was traced. It may
stand in for the function itself only as long as those are the same: closure
variables, defaults, attributes, globals that it and the user's functions called
by it name, and what Modules hold besides arrays. Installed packages count as
constant.
"""
from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
import typing as tp

import jax
import numpy as np

from flax.nnx import variablelib
from flax.nnx.pytreelib import Pytree
from flax.nnx.training.bytecode import reads_of
from flax.nnx.training.snapshot import is_stateful

_CONSTANTS = (
  type(None), bool, int, str, bytes, type, enum.Enum, np.dtype, np.ufunc,
  np.generic, type(Ellipsis),
)  # fmt: skip
_LIBRARIES = frozenset({'flax', 'jax', 'jaxlib', 'numpy', 'optax', 'scipy'})
# Their objects are equal only where they mean the same, and stay what they are.
_VALUES = frozenset({'flax', 'jax', 'jaxlib', 'optax'})
_MAX_BYTES = 1 << 22  # of a NumPy array; hashing more takes milliseconds

Seen = dict[int, int]


class NotConstant(Exception):
  """Something may change without notice."""


class Same:
  """Key of an object that equals nothing but the very same object."""

  def __init__(self, x: tp.Any):
    self._x = x  # kept, so that its id is not used again

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Same) and self._x is other._x

  def __hash__(self) -> int:
    return id(self._x)


def key_of(x: tp.Any) -> tp.Hashable:
  """A key that equals an earlier one only if ``x`` means the same as then.

  Args:
    x: a function, an array, a constant, or a pytree of such.

  Raises:
    NotConstant: ``x`` holds something that can change in place.
  """
  return _key(x, {})


def key_of_modules(nodes: tp.Any) -> tp.Hashable:
  """A key of what Modules hold besides Variables and arrays, and of their code.

  Args:
    nodes: pytree of Modules.

  Raises:
    NotConstant: an attribute can change in place.
  """
  keys: list[tp.Hashable] = []
  visited: set[int] = set()
  classes: set[type] = set()
  seen: Seen = {}

  def visit(x):
    if isinstance(x, Pytree) and id(x) not in visited:
      visited.add(id(x))
      classes.update(type(x).__mro__)
      is_data = x._pytree__nodes
      for name, value in vars(x).items():
        if name.startswith('_pytree__'):
          continue
        if is_data.get(name):
          visit(value)
        else:
          keys.append((name, _key(value, seen)))
    elif isinstance(x, (tuple, list)):
      for item in x:
        visit(item)
    elif isinstance(x, dict):
      for item in x.values():
        visit(item)

  visit(nodes)
  by_name = lambda cls: (cls.__module__, cls.__qualname__)
  for cls in sorted(classes, key=by_name):
    if not _is_library(cls.__module__):
      keys.append((cls, _class_key(cls, seen)))
  return tuple(keys)


def root_code(fn: tp.Any) -> types.CodeType:
  """The code behind a function, a partial or a jitted function.

  Raises:
    NotConstant: there is none, or it is of a method.
  """
  while not isinstance(fn, types.FunctionType):
    inner = getattr(fn, 'func', None) or getattr(fn, '__wrapped__', None)
    if inner is None or isinstance(fn, types.MethodType):
      raise NotConstant(f'{fn!r} is not a function')
    fn = inner
  return fn.__code__


def is_constant(x: tp.Any) -> bool:
  """Whether ``x`` is a value that nothing can change."""
  return isinstance(x, (*_CONSTANTS, float, complex))


@functools.lru_cache(maxsize=1024)
def _is_library(module_name: str | None) -> bool:
  root = (module_name or '').split('.')[0]
  if root in _LIBRARIES:
    return True
  if root == '__main__' or not root:
    return False
  file = getattr(sys.modules.get(module_name), '__file__', None) or ''
  return root in sys.stdlib_module_names or 'site-packages' in file


def _key(x: tp.Any, seen: Seen) -> tp.Hashable:
  if isinstance(x, _CONSTANTS):
    return type(x), x
  if isinstance(x, (float, complex)):
    return type(x), repr(x)  # tells 0.0 from -0.0, but not nan from nan
  if isinstance(x, jax.Array) and not variablelib.is_array_ref(x):
    return Same(x)
  if isinstance(x, types.ModuleType) or type(x) is object:  # a sentinel
    return Same(x)
  if isinstance(x, np.ndarray):
    return _ndarray_key(x)
  if is_stateful(x):
    raise NotConstant(f'{type(x).__name__} holds Variables')
  if callable(x):
    # Functions may refer to each other, and to themselves.
    if id(x) in seen:
      return 'seen', seen[id(x)]
    seen[id(x)] = len(seen)
    return _callable_key(x, seen)
  if isinstance(x, (set, frozenset)):
    return type(x), frozenset(_key(item, seen) for item in x)
  return _pytree_key(x, seen)


def _ndarray_key(x: np.ndarray) -> tp.Hashable:
  if x.dtype.hasobject or x.nbytes > _MAX_BYTES:
    raise NotConstant(f'NumPy array of dtype {x.dtype}, {x.nbytes} bytes')
  digest = hashlib.blake2b(np.ascontiguousarray(x).tobytes()).digest()
  return np.ndarray, x.shape, x.dtype, digest


def _pytree_key(x: tp.Any, seen: Seen) -> tp.Hashable:
  try:
    children, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    hash(treedef)
  except Exception as error:
    raise NotConstant(f'{type(x).__name__} is no pytree') from error
  if not (children and children[0] is x):
    return treedef, tuple(_key(child, seen) for child in children)
  is_value = type(x).__module__.split('.')[0] in _VALUES
  if is_value and type(x).__hash__ is not None:
    return type(x), x  # filters, shardings, ...
  raise NotConstant(f'{type(x).__name__} may change')


def _callable_key(x: tp.Any, seen: Seen) -> tp.Hashable:
  if isinstance(x, functools.partial):
    return 'partial', *(
      _key(part, seen) for part in (x.func, x.args, x.keywords)
    )
  if isinstance(x, types.FunctionType):
    return _function_key(x, seen)
  if isinstance(x, types.BuiltinFunctionType):
    if x.__self__ is None or isinstance(x.__self__, types.ModuleType):
      return Same(x)
    raise NotConstant(f'method of {type(x.__self__).__name__}')
  if isinstance(x, types.MethodType):
    if isinstance(x.__self__, type):
      return x.__self__, _key(x.__func__, seen)
    raise NotConstant(f'method of {type(x.__self__).__name__}')
  if isinstance(x, types.MethodWrapperType):
    raise NotConstant('method of an object')
  if _is_library(type(x).__module__):  # jax.jit, jax.custom_vjp, ...
    wrapped = getattr(x, '__wrapped__', None)
    return Same(x), None if wrapped is None else _key(wrapped, seen)
  raise NotConstant(f'{type(x).__name__} is no function')


def _function_key(fn: types.FunctionType, seen: Seen) -> tp.Hashable:
  code = fn.__code__
  closure = {}
  for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
    try:
      closure[name] = cell.cell_contents
    except ValueError:  # not assigned yet
      closure[name] = None
  if _is_library(fn.__globals__.get('__name__')) or (
    'site-packages' in code.co_filename
  ):
    if '<locals>' not in fn.__qualname__:
      return Same(fn)
    # A wrapper that a library made holds the user's function in its closure.
    parts = (*closure.values(), fn.__defaults__, fn.__kwdefaults__)
    return code, tuple(_key(part, seen) for part in parts)
  reads = reads_of(code)
  for module in reads.imports:
    if not _is_library(module):
      raise NotConstant(f'imports {module}')
  keys = [
    _read_key(scope[name], attributes, seen)
    for name, attributes in reads.names
    for scope in (closure, fn.__globals__)
    if name in scope
  ]
  # What the function adds to does not decide what it means, but it has to be
  # the same thing that is added to.
  cells = dict(zip(code.co_freevars, fn.__closure__ or ()))
  keys += [Same(cells.get(name, fn.__globals__)) for name in reads.effects]
  extras = (fn.__defaults__, fn.__kwdefaults__, vars(fn))
  keys += [_key(x, seen) if x else None for x in extras]
  return code, tuple(keys)


def _read_key(
  x: tp.Any, attributes: tuple[str, ...], seen: Seen
) -> tp.Hashable:
  """Key of a value of which the code reads some attribute."""
  if attributes and isinstance(x, (types.ModuleType, type)):
    name = x.__module__ if isinstance(x, type) else x.__name__
    is_open = not _is_library(name) and hasattr(x, attributes[0])
  else:
    is_open = bool(attributes) and not (
      is_stateful(x) or callable(x) or isinstance(x, jax.Array)
    ) and attributes[0] in getattr(x, '__dict__', ())
  if not is_open:
    return _key(x, seen)
  value = getattr(x, attributes[0])
  return Same(x), attributes[0], _read_key(value, attributes[1:], seen)


def _class_key(cls: type, seen: Seen) -> tp.Hashable:
  """Key of the code of a user's class."""
  keys = []
  for name, member in vars(cls).items():
    if isinstance(member, (staticmethod, classmethod)):
      member = member.__func__
    if isinstance(member, property):
      member = member.fget
    if isinstance(member, types.FunctionType):
      keys.append((name, _key(member, seen)))
  return tuple(keys)
