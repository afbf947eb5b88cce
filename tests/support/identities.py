"""Numeric users and groups of a private host.

Production makes named accounts with sysusers; a test must not add accounts to the machine it runs on, so it
uses bare numbers. The range 60578-60705 is left unassigned by systemd's UIDS-GIDS table, so no account can
hold one of them.
"""

from typing import Final

FORWARDER: Final = 60600
GATEWAY: Final = 60601
CONTROL: Final = 60602
CONTRACT_GROUP: Final = 60603
RUNNER_GROUP: Final = 60604
ENGINE_GROUP: Final = 60605
SANDBOX: Final = 60610
