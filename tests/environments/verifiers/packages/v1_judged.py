"""A judge, which is a model at the same endpoint, grades the answer."""

import os

import verifiers.v1 as vf


class Verdict(vf.Judge[bool]):
    prompt = "JUDGE {question} | {response}"

    def parse(self, response):
        return response.text.strip() == "yes"


class Judged(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def good(self, trace) -> float:
        config = vf.JudgeConfig(base_url=os.environ["JUDGE_URL"], api_key_var="JUDGE_KEY", model="judge")
        said = await Verdict(config).evaluate(trace=trace, question=self.data.prompt_text, response=trace.last_reply)
        return float(said.parsed)


class JudgedTasks(vf.Taskset[Judged, vf.TasksetConfig]):
    def load(self):
        for i in range(6):
            yield Judged(vf.TaskData(prompt=f"What is {i} + 1?"))


__all__ = ["JudgedTasks"]
