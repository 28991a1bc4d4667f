# SPDX-License-Identifier: Apache-2.0
"""The demo's inputs, its comparison with transformers + PEFT, and its last screen (./run demo)."""
