// The error of an answer of the API.
export class ApiError extends Error {
  constructor(status, code, detail, hint = "") {
    super(detail);
    Object.assign(this, {name: "ApiError", status, code, detail, hint});
  }
}
