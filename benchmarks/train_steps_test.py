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
"""The benchmark runs; what it measures is not tested."""

import importlib.util
import io
import pathlib
from contextlib import redirect_stdout

from absl.testing import absltest

SPEC = importlib.util.spec_from_file_location(
  'train_steps', pathlib.Path(__file__).with_name('train_steps.py')
)
train_steps = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(train_steps)


class TestTrainSteps(absltest.TestCase):
  def test_runs(self):
    text = io.StringIO()
    with redirect_stdout(text):
      ratios = train_steps.main(['--rounds', '1'])
    self.assertLen(ratios, 9)
    for (name, _), ratio in ratios.items():
      self.assertGreater(ratio, 0.0)
      self.assertIn(name, text.getvalue())


if __name__ == '__main__':
  absltest.main()
