"""What a balancer asks: whether the service lives, and whether it takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pyllama_raw.results import HealthState
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Endpoints of probes; they need no key."""
    router = APIRouter(tags=["probes"])

    @router.get("/livez")
    async def livez() -> Response:
        """200 unless an engine thread hangs or has failed: then restart the process."""
        states = _states(service)
        lives = not {HealthState.STALLED, HealthState.DEAD} & {*states.values()}
        return JSON(
            {"status": "ok" if lives else "stalled", "models": states},
            200 if lives else 503,
        )

    @router.get("/readyz")
    @router.get("/health")
    @router.get("/v1/health", include_in_schema=False)
    async def readyz() -> Response:
        """200 while new requests are taken."""
        ready = not service.drains and all(e.alive for e in service.engines.values())
        return JSON({"status": "ok" if ready else "draining"}, 200 if ready else 503)

    return router


def _states(service: Service) -> dict[str, HealthState]:
    stall_s = service.config.stall_s
    return {n: e.health(stall_s).state for n, e in service.engines.items()}
