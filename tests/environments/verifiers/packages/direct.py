"""A harness that makes one model call per turn, in the process of verifiers itself."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else list(map(message_to_wire, prompt or []))
        )
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


__all__ = ["DirectHarness"]
