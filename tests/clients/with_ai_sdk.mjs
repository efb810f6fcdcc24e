// AI SDK over chat completions and over responses: stream, tools, a second turn, and tools beside a typed answer.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const report = z.object({ city: z.string().max(20), degrees: z.number().int().min(-40).max(60) });
const tools = {
  weather: tool({
    description: "Returns the weather in a city.",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: ({ city }) => `It is 21 degrees in ${city}.`,
  }),
  add: tool({
    description: "Returns the sum of two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: ({ a, b }) => a + b,
  }),
};

async function feature(name, run) {
  let result = "ok";
  try {
    await run();
  } catch (thrown) {
    result = `failed: ${thrown.name}: ${thrown.message}`.split("\n")[0].slice(0, 300);
  }
  console.log(JSON.stringify({ feature: name, result }));
}

function check(holds) {
  if (!holds) throw new Error("the answer lacks what was asked for");
}

async function converse(name, model) {
  const settings = { model, temperature: 0, maxOutputTokens: 120, maxRetries: 0 };
  const messages = [{ role: "user", content: "What is the weather in Paris? Call weather." }];
  await feature(`${name}: stream`, async () => {
    const failed = [];
    const stream = streamText({ ...settings, messages, onError: ({ error }) => failed.push(error) });
    const text = await stream.text;
    if (failed.length) throw failed[0];
    check(text);
  });
  await feature(`${name}: tools`, async () => {
    const toolChoice = { type: "tool", toolName: "weather" };
    const answer = await generateText({ ...settings, messages, tools, toolChoice });
    check(answer.toolResults.length === 1);
    messages.push(...answer.response.messages, { role: "user", content: "And the sum of 2 and 3? Call add." });
  });
  await feature(`${name}: second turn`, async () => {
    const answer = await generateText({ ...settings, messages, tools, stopWhen: isStepCount(3) });
    messages.push(...answer.response.messages, { role: "user", content: "Report city and degrees as JSON." });
  });
  await feature(`${name}: tools+format`, async () => {
    const output = Output.object({ schema: report });
    const answer = await generateText({ ...settings, messages, tools, output, stopWhen: isStepCount(3) });
    check(answer.finishReason === "tool-calls" || answer.output);
  });
  await feature(`${name}: final structure`, async () => {
    const { output } = await generateText({ ...settings, messages, output: Output.object({ schema: report }) });
    report.parse(output);
  });
}

const compatible = { name: "jlade", baseURL, apiKey, supportsStructuredOutputs: true };
await converse("chat", createOpenAICompatible(compatible)("smollm2"));
await converse("responses", createOpenAI({ baseURL, apiKey })("smollm2"));
