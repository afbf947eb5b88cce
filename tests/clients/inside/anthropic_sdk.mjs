// The same as anthropic_sdk.py with the SDK for TypeScript: the same arguments, the same report.

import Anthropic from '@anthropic-ai/sdk';

const TOOLS = [
  {
    name: 'read_file',
    description: 'Read a file',
    input_schema: { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] },
  },
];
const QUESTION = [{ role: 'user', content: 'What does the file say?' }];

async function talk() {
  const client = new Anthropic();
  const arrivals = [];
  const stream = client.messages.stream({ model: 'fake-slow', max_tokens: 100, messages: QUESTION });
  stream.on('text', (text) => arrivals.push([performance.now(), text]));
  const streamed = await stream.finalMessage();
  const asked = await client.messages
    .stream({ model: 'fake-model', max_tokens: 100, messages: QUESTION, tools: TOOLS })
    .finalMessage();
  const [call] = asked.content;
  const messages = [
    ...QUESTION,
    { role: 'assistant', content: [call] },
    { role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: 'It says hello.' }] },
  ];
  const answer = await client.messages.create({ model: 'fake-model', max_tokens: 100, messages, tools: TOOLS });
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  return {
    pieces: arrivals.map(([, text]) => text),
    seconds: (arrivals.at(-1)[0] - arrivals[0][0]) / 1000,
    output_tokens: streamed.usage.output_tokens,
    stop_reason: asked.stop_reason,
    tool: call.name,
    tool_input: call.input,
    answer: answer.content.map((block) => block.text).join(''),
    counted: (await client.messages.countTokens({ model: 'fake-model', messages: QUESTION })).input_tokens,
    models,
  };
}

async function ask(client, model) {
  try {
    await client.messages.stream({ model, max_tokens: 100, messages: QUESTION }).finalMessage();
    return null;
  } catch (error) {
    if (!error.status) return { broken: error.constructor.name };
    return {
      status: error.status,
      type: error.error.error.type,
      message: error.error.error.message,
      request_id: error.requestID ?? null,
      retry_after: error.headers.get('retry-after'),
    };
  }
}

async function main(what) {
  if (what === 'talk') return talk();
  if (what === 'fail') {
    const client = new Anthropic({ maxRetries: 0 });
    const reports = {};
    for (const model of ['fake-429', 'fake-400', 'fake-529', 'fake-cut']) reports[model] = await ask(client, model);
    return reports;
  }
  if (what === 'stranger') return ask(new Anthropic({ authToken: 'another-token' }), 'fake-model');
  const client = new Anthropic({ maxRetries: what === 'spend' ? 2 : 0 });
  for (let answers = 0; answers < 5; answers++) {
    const refusal = await ask(client, 'fake-model');
    if (refusal) return { answers, refusal };
  }
  return { answers: 5 };
}

console.log(JSON.stringify(await main(process.argv[2])));
