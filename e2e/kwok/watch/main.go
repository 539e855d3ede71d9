// Command watch watches collections of the API server, in JSON or in protobuf, and drops what it reads. So the API
// server's cost of a watch in each format can be measured without that of a client.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"time"

	"fenka.io/e2e/kwok/identity"
)

var formats = map[string]string{
	"json":     "application/json",
	"protobuf": "application/vnd.kubernetes.protobuf;stream=watch",
}

func main() {
	server := flag.String("server", "", "URL of the API server")
	pki := flag.String("pki", "", "directory of the certificates")
	format := flag.String("format", "json", "json or protobuf")
	flag.Parse()
	accept, known := formats[*format]
	if !known {
		log.Fatalf("-format must be json or protobuf, not %s", *format)
	}
	config, err := identity.Config(*pki+"/ca.crt", *pki+"/fenka.crt", *pki+"/fenka.key")
	if err != nil {
		log.Fatal(err)
	}
	// As fenka: HTTP/1.1, a connection for each watch.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
	for _, path := range flag.Args() {
		go follow(client, *server+path, accept)
	}
	select {}
}

func follow(client *http.Client, collection, accept string) {
	for {
		if err := watch(client, collection, accept); err != nil {
			log.Printf("%s: %v", collection, err)
			time.Sleep(time.Second)
		}
	}
}

func watch(client *http.Client, collection, accept string) error {
	version, err := version(client, collection)
	if err != nil {
		return err
	}
	query := url.Values{
		"watch": {"true"}, "resourceVersion": {version}, "allowWatchBookmarks": {"true"}, "timeoutSeconds": {"300"},
	}
	body, err := get(client, collection+"?"+query.Encode(), accept)
	if err != nil {
		return err
	}
	defer body.Close()
	_, err = io.Copy(io.Discard, body)
	return err
}

// version returns the version of a collection from which it can be watched.
func version(client *http.Client, collection string) (string, error) {
	body, err := get(client, collection+"?limit=1", formats["json"])
	if err != nil {
		return "", err
	}
	defer body.Close()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	err = json.NewDecoder(body).Decode(&list)
	return list.Metadata.ResourceVersion, err
}

func get(client *http.Client, address, accept string) (io.ReadCloser, error) {
	request, err := http.NewRequest(http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", accept)
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode >= 300 {
		answer.Body.Close()
		return nil, fmt.Errorf("the API server answers %s", answer.Status)
	}
	return answer.Body, nil
}
