// Fills a template as Ollama does: conversations come as JSON on standard input, texts go out as JSON.
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"text/template"
)

// Ollama prints functions and arguments as JSON; here the text of that is given.
type call struct {
	Function struct{ Name, Arguments string }
}

type tool struct{ Function string }

type message struct {
	Role, Content string
	ToolCalls     []call
}

type conversation struct {
	System   string
	Messages []message
	Tools    []tool
}

func main() {
	var given struct {
		Template      string
		Conversations []conversation
	}
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(given.Template))
	texts := []string{}
	for _, one := range given.Conversations {
		var text bytes.Buffer
		if err := parsed.Execute(&text, one); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
