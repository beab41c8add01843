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
"""The declarations of ``tools/fork.toml``."""

import dataclasses
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]


class ForkError(Exception):
  """Something that the maintainer of the fork has to mend."""


@dataclasses.dataclass(frozen=True)
class Base:
  """A release of Flax that the fork is laid over.

  Attributes:
    python: first Python version that gets this base.
    version: of Flax.
    wheel_sha256: of its wheel.
    sdist_sha256: of its source archive.
    baseline: tests of upstream's ``tests/nnx`` that pass without the patch.
  """

  python: str
  version: str
  wheel_sha256: str
  sdist_sha256: str
  baseline: int


@dataclasses.dataclass(frozen=True)
class Insertion:
  """Lines that an upstream file gets after the one that matches ``anchor``."""

  file: str
  anchor: str
  lines: tuple[str, ...]

  def apply(self, text: str) -> str:
    """``text`` with the lines inserted, indented like the anchor.

    Raises:
      ForkError: not exactly one line matches the anchor.
    """
    lines = text.split('\n')
    pattern = re.compile(rf'\s*{self.anchor}\s*')
    found = [i for i, line in enumerate(lines) if pattern.fullmatch(line)]
    if len(found) != 1:
      raise ForkError(
        f'{self.file}: the anchor {self.anchor!r} of an insertion matches '
        f'{len(found)} lines, it must match one. Adapt the [[insertion]] in '
        'tools/fork.toml to this release of Flax.'
      )
    (at,) = found
    indent = re.match(r'\s*', lines[at]).group()
    new = [(indent + line).rstrip() for line in self.lines]
    return '\n'.join(lines[: at + 1] + new + lines[at + 1 :])


@dataclasses.dataclass(frozen=True)
class Config:
  """All declarations; ``root`` is the checkout of the fork."""

  root: pathlib.Path
  patch: int
  rebased_file: str
  rebased_sha256: str
  replaced_files: tuple[str, ...]
  upstream_paths: tuple[str, ...]
  bases: tuple[Base, ...]
  insertions: tuple[Insertion, ...]

  def base(self, python: tuple[int, int] = sys.version_info[:2]) -> Base:
    """The base for a Python version, that of the running one by default."""
    for base in self.bases:
      if python >= tuple(map(int, base.python.split('.'))):
        return base
    raise ForkError(
      f'No base release for Python {python[0]}.{python[1]}. Use a newer one, '
      'or declare a [[base]] in tools/fork.toml.'
    )

  def version(self, base: Base | None = None) -> str:
    """Version of the fork, such as ``0.12.12+extraargs.1``."""
    return f'{(base or self.base()).version}+extraargs.{self.patch}'


def load(root: pathlib.Path = ROOT) -> Config:
  """Reads ``tools/fork.toml`` of the checkout at ``root``."""
  data = tomllib.loads((root / 'tools/fork.toml').read_text())
  insertions = (
    Insertion(i['file'], i['anchor'], tuple(i['lines']))
    for i in data['insertion']
  )
  return Config(
    root=root,
    patch=data['patch'],
    rebased_file=data['rebased_file'],
    rebased_sha256=data['rebased_sha256'],
    replaced_files=tuple(data['replaced_files']),
    upstream_paths=tuple(data['upstream_paths']),
    bases=tuple(Base(**base) for base in data['base']),
    insertions=tuple(insertions),
  )
