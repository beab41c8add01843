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
"""What a maintainer of the fork needs.

usage: python tools/fork.py COMMAND [--help]
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from forklib import (  # noqa: E402
  check,
  config,
  docs,
  overlay,
  pull_request,
  upstream_tests,
)


def _tree(settings, args):
  base = settings.base()
  target = args.out or settings.root / 'build/tree' / f'flax-{base.version}'
  overlay.lay_tree(settings, base, target)
  print(target)


def _link(settings, args):
  print(overlay.lay_editable(settings, settings.base()))


def _test_upstream(settings, args):
  upstream_tests.run(settings, settings.base(), args.pytest_args)


def _pr(settings, args):
  written = pull_request.write(settings, args.checkout.resolve())
  print(f'{len(written)} files written to {args.checkout}:')
  print('\n'.join(written))


def _check(settings, args):
  obstacles = check.check(settings, args.version)
  if obstacles:
    listed = '\n- '.join(obstacles)
    raise config.ForkError(
      f'The patch does not fit flax {args.version}:\n- {listed}'
    )
  print(f'The patch fits flax {args.version}.')


def _docs(settings, args):
  if args.execute:
    for text in docs.guides(settings):
      print(docs.execute(text))
    return
  base = settings.base()
  target = args.out or settings.root / 'build/docs' / f'flax-{base.version}'
  print(docs.build(settings, base, target.resolve()))


def _parser():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(name, function, text):
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(function=function)
    return command

  add(
    'tree', _tree, 'write the whole fork as one source tree'
  ).add_argument('--out', type=pathlib.Path, help='folder; it is replaced')
  add(
    'link', _link,
    'lay the editable tree of this Python anew, after adding files',
  )
  add(
    'test-upstream', _test_upstream,
    "run upstream's tests against the installed fork",
  ).add_argument(
    'pytest_args', nargs=argparse.REMAINDER,
    help='for pytest, relative to upstream\'s tests/ (default: nnx)',
  )
  add(
    'pr', _pr, 'write our files and insertions into a google/flax checkout'
  ).add_argument('checkout', type=pathlib.Path)
  add(
    'check', _check, 'tell whether the patch fits another release of Flax'
  ).add_argument('version')
  command = add('docs', _docs, 'build the documentation of the fork')
  command.add_argument('--out', type=pathlib.Path, help='folder of the pages')
  command.add_argument(
    '--execute', action='store_true',
    help='run the guides and write their notebooks, instead of building',
  )
  return parser


def main(argv=None):
  args = _parser().parse_args(argv)
  try:
    args.function(config.load(), args)
  except config.ForkError as error:
    sys.exit(f'fork: {error}')


if __name__ == '__main__':
  main()
