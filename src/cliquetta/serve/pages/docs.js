"use strict";
// Renders the OpenAPI document of this server, with a form to try each request.

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function resolve(schema, all) {
  return schema && schema.$ref ? all[schema.$ref.split("/").pop()] : schema || {};
}

function describe(schema, parent) {
  const table = element("table", "", parent);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = element("tr", "", table);
    element("code", name, element("td", "", row));
    const needed = (schema.required || []).includes(name);
    const fallback = "default" in field ? "default " + JSON.stringify(field.default) : "";
    element("td", needed ? "required" : fallback, row);
    element("td", field.description || "", row);
  }
}

function input(form, label, type) {
  const made = element("input", "", element("label", label + " ", form));
  made.type = type;
  return made;
}

function operation(path, method, spec, all, parent) {
  const box = element("details", "", parent);
  box.id = spec.operationId;
  const summary = element("summary", "", box);
  element("code", method.toUpperCase() + " " + path, summary);
  summary.append(" " + (spec.summary || ""));
  element("p", spec.description || "", box);
  const content = (spec.requestBody || {}).content || {};
  const json = content["application/json"];
  const form = element("form", "", box);
  const values = (spec.parameters || []).map((p) => [p.name, input(form, p.name, "text")]);
  let text = null;
  let files = null;
  if (content["multipart/form-data"]) {
    describe(content["multipart/form-data"].schema, form);
    files = input(form, "images", "file");
    files.multiple = true;
  } else if (json) {
    const schema = resolve(json.schema, all);
    describe(schema, form);
    text = element("textarea", JSON.stringify((schema.examples || [{}])[0], null, 2), form);
    text.rows = 6;
  } else if (content["application/octet-stream"]) {
    files = input(form, "file", "file");
  }
  element("button", "Send", form);
  const output = element("pre", "", box);
  output.hidden = true;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let url = path.slice(1);
    for (const [name, field] of values) {
      url = url.replace(`{${name}}`, encodeURIComponent(field.value));
    }
    const headers = {};
    const token = document.getElementById("token").value;
    if (token) headers.Authorization = "Bearer " + token;
    let body;
    if (text) {
      headers["Content-Type"] = "application/json";
      body = text.value;
    } else if (files && files.multiple) {
      body = new FormData();
      for (const file of files.files) body.append("images", file);
    } else if (files) {
      headers["Content-Type"] = "application/octet-stream";
      body = files.files[0];
    }
    const got = await fetch(url, { method: method.toUpperCase(), headers, body });
    const kind = got.headers.get("Content-Type") || "";
    const shown = kind.includes("json") ? JSON.stringify(await got.json(), null, 2)
      : kind.startsWith("text/") ? await got.text() : `${(await got.blob()).size} bytes`;
    output.textContent = `${got.status} ${got.statusText}\n${shown}`;
    output.hidden = false;
  });
}

fetch("openapi.json").then((got) => got.json()).then((document_) => {
  const parent = document.getElementById("operations");
  parent.textContent = "";
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, spec] of Object.entries(methods)) {
      operation(path, method, spec, document_.components.schemas, parent);
    }
  }
});
