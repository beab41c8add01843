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
"""Which names from outside a function's code reads, from its bytecode."""
from __future__ import annotations

import dis
import types
import typing as tp
import weakref

_LOADS = ('LOAD_GLOBAL', 'LOAD_NAME', 'LOAD_DEREF', 'LOAD_CLASSDEREF')
_ATTRIBUTES = ('LOAD_ATTR', 'LOAD_METHOD')


class Reads(tp.NamedTuple):
  """What code reads from outside.

  Attributes:
    names: pairs of a name (global or of a closure) and the attributes taken
      from it, as in ``config.model.width``.
    effects: names of what it only adds to (``n += 1``, ``log.append(x)``).
    imports: modules that it imports when it runs.
  """

  names: tuple[tuple[str, tuple[str, ...]], ...]
  effects: tuple[str, ...]
  imports: tuple[str, ...]


_READS: weakref.WeakKeyDictionary[types.CodeType, Reads]
_READS = weakref.WeakKeyDictionary()


def reads_of(code: types.CodeType) -> Reads:
  """What ``code``, and functions that it defines, read from outside."""
  if code not in _READS:
    _READS[code] = _analyze(code)
  return _READS[code]


def _analyze(code: types.CodeType) -> Reads:
  instructions = list(dis.get_instructions(code))
  names: set[tuple[str, tuple[str, ...]]] = set()
  effects: set[str] = set()
  imports: set[str] = set()
  for i, instruction in enumerate(instructions):
    if instruction.opname == 'IMPORT_NAME':
      imports.add(instruction.argval)
    if instruction.opname not in _LOADS:
      continue
    following = instructions[i + 1 : i + 8]
    attributes = []
    for after in following:
      if after.opname not in _ATTRIBUTES:
        break
      attributes.append(after.argval)
    if attributes == ['append'] or _is_counted(instruction, following):
      effects.add(instruction.argval)
    else:
      names.add((instruction.argval, tuple(attributes)))
  for const in code.co_consts:
    if isinstance(const, types.CodeType):
      inner = reads_of(const)
      names.update(inner.names)
      effects.update(inner.effects)
      imports.update(inner.imports)
  return Reads(*(tuple(sorted(found)) for found in (names, effects, imports)))


def _is_counted(
  load: dis.Instruction, following: list[dis.Instruction]
) -> bool:
  """Whether a value is loaded only to be stored again, larger by a number."""
  if len(following) < 3:
    return False
  number, operation, store = following[:3]
  return (
    number.opname in ('LOAD_CONST', 'LOAD_SMALL_INT')
    and operation.opname == 'BINARY_OP'
    and store.opname in ('STORE_GLOBAL', 'STORE_DEREF', 'STORE_NAME')
    and store.argval == load.argval
  )
