// The search's worker for a site opened from a disk: browsers start no workers
// from files, so its script runs in a hidden frame. A server needs none of it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      this.started = new Promise((resolve) => (script.onload = resolve))
      script.src = url
      frame.contentDocument.body.appendChild(script)
    }

    postMessage(data) {
      const event = () => new MessageEvent("message", { data })
      this.started.then(() => this.inside.dispatchEvent(event()))
    }
  }
}
