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
"""Build hook of hatchling: completes our files with a release of Flax."""

import pathlib
import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from forklib import config as config_lib  # noqa: E402
from forklib import overlay  # noqa: E402


class CustomBuildHook(BuildHookInterface):
  """Adds the files of the base release to a wheel or an editable install."""

  def initialize(self, version, build_data):
    if self.target_name != 'wheel':
      return
    config = config_lib.load(pathlib.Path(self.root))
    base = config.base()
    try:
      if version == 'editable':
        tree = overlay.lay_editable(config, base)
        self.build_config.target_config['dev-mode-dirs'] = [
          tree.relative_to(self.root).as_posix()
        ]
      else:
        files = overlay.wheel_files(config, base)
        build_data['force_include'].update(
          {str(source): name for name, source in files.items()}
        )
    except config_lib.ForkError as error:
      sys.exit(f'flax fork: {error}')
