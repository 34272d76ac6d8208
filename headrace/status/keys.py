"""The names of the store's keys, and how long each lives.

A request's keys share one hash tag, so that one script can reach all of them in a cluster. The
schema's version is part of every name: services of another version see other keys.
"""

from dataclasses import dataclass

_SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix, by which several pools can share a server."""

    prefix: str

    def spec(self, request_id: str) -> str:
        """A request's spec; scripts derive the request's other keys from this name."""
        return f"{self.prefix}:{_SCHEMA_VERSION}:{{{request_id}}}:spec"

    def status(self, request_id: str, index: int) -> str:
        """The record of a request's completion."""
        return f"{self.prefix}:{_SCHEMA_VERSION}:{{{request_id}}}:status#{index}"

    def lease(self, role: str, name: str) -> str:
        """The incarnation of a process that lives."""
        return f"{self.prefix}:{_SCHEMA_VERSION}:{{lease:{role}:{name}}}"

    def routers(self) -> str:
        """The routers that have live requests: a set of `live_member` names."""
        return f"{self.prefix}:{_SCHEMA_VERSION}:{{routers}}"

    def live(self, router_id: str, incarnation: str) -> str:
        """The live requests of a router's run: a set."""
        return f"{self.prefix}:{_SCHEMA_VERSION}:{{live:{incarnation}:{router_id}}}"
