"""`python -m router`: builds everything, serves until told to stop, and leaves in order.

Health says SERVING as soon as calls are answered, ready workers or not: a router without workers
answers UNAVAILABLE itself, with a RetryInfo, and ListModels says how many workers are ready.
"""

import asyncio
import contextlib
import logging
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.config import ConfigError, flags, given, load
from headrace.service.process import ProcessConfig, run, write_address
from headrace.service.serving import GrpcServer, ServingConfig, wait_for_signal
from headrace.v1 import inference_pb2_grpc
