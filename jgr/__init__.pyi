# SPDX-License-Identifier: Apache-2.0
from jgr.client.embedded import Engine as Engine
from jgr.client.errors import DeadlineExceeded as DeadlineExceeded
from jgr.client.errors import Error as Error
from jgr.client.errors import InternalError as InternalError
from jgr.client.errors import InvalidRequest as InvalidRequest
from jgr.client.errors import NotFound as NotFound
from jgr.client.errors import Overloaded as Overloaded
from jgr.client.errors import RequestFailed as RequestFailed
from jgr.client.errors import Unauthorized as Unauthorized
from jgr.client.errors import Unavailable as Unavailable
from jgr.client.remote import Client as Client
from jgr.config import Config as Config
from jgr.serving.api import Answer as Answer
from jgr.serving.api import Filters as Filters
from jgr.serving.api import Item as Item
from jgr.serving.api import ModelInfo as ModelInfo
from jgr.serving.prefill import Prefilled as Prefilled

__version__: str
