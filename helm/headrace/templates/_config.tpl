{{/* The settings file of a service. */}}

{{/* A value as TOML. Helm holds whole numbers as floats and would print the large ones as 1e+07. */}}
{{- define "headrace.toml.value" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if kindIs "slice" . -}}
[{{ range $i, $item := . }}{{ if $i }}, {{ end }}{{ include "headrace.toml.value" $item }}{{ end }}]
{{- else if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha }}{{ if $i }},{{ end }} {{ $key | toJson }} = {{ include "headrace.toml.value" (get $ $key) }}{{ end }} }
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end }}

{{/* A whole file: a dict of sections. Null leaves a setting at its default. */}}
{{- define "headrace.toml" -}}
{{- range $section := keys . | sortAlpha }}
[{{ $section }}]
{{- $settings := get $ $section }}
{{- range $key := keys $settings | sortAlpha }}
{{- $value := get $settings $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "headrace.toml.value" $value }}
{{- end }}
{{- end }}
{{ end -}}
{{- end }}

{{/*
The sections that every service has, as YAML; takes a dict of root, values, port, service (whose token
and certificate this is) and perhaps next (the service that is called).
*/}}
{{- define "headrace.commonConfig" -}}
{{- $serving := dict "listen" (printf "0.0.0.0:%d" (int .port)) "drain_timeout_s" .values.drainTimeoutSeconds -}}
{{- $channel := dict -}}
{{- if .root.Values.auth.enabled -}}
{{- $_ := set $serving "auth_token_file" (printf "/etc/headrace/tokens/%s-token" .service) -}}
{{- if and (eq .service "router") .root.Values.auth.apiKeys.existingSecret -}}
{{- $_ := set $serving "api_keys_file" "/etc/headrace/keys/keys.toml" -}}
{{- end -}}
{{- if .next -}}
{{- $_ := set $channel "auth_token_file" (printf "/etc/headrace/tokens/%s-token" .next) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.tls.enabled -}}
{{- $_ := set $serving "tls_cert_file" "/etc/headrace/tls/tls.crt" -}}
{{- $_ := set $serving "tls_key_file" "/etc/headrace/tls/tls.key" -}}
{{- if or (ne .service "router") .root.Values.tls.requireClientCertificates -}}
{{- $_ := set $serving "tls_client_ca_file" "/etc/headrace/tls/ca.crt" -}}
{{- end -}}
{{- $_ := set $channel "tls_ca_file" "/etc/headrace/tls/ca.crt" -}}
{{- $_ := set $channel "tls_cert_file" "/etc/headrace/tls/tls.crt" -}}
{{- $_ := set $channel "tls_key_file" "/etc/headrace/tls/tls.key" -}}
{{- end -}}
{{- $process := dict "log_level" .root.Values.telemetry.logLevel "log_format" .root.Values.telemetry.logFormat -}}
{{- with .root.Values.telemetry.otlpEndpoint -}}
{{- $_ := set $process "otlp_endpoint" . -}}
{{- end -}}
{{- $config := dict "serving" $serving "process" $process -}}
{{- if .root.Values.monitoring.enabled -}}
{{- $admin := dict "listen" "0.0.0.0:8710" -}}
{{- if .root.Values.auth.enabled -}}
{{- $_ := set $admin "auth_token_file" (get $serving "auth_token_file") -}}
{{- $_ := set $admin "metrics_token_file" "/etc/headrace/tokens/metrics-token" -}}
{{- else -}}
{{- $_ := set $admin "allow_strangers" true -}}
{{- end -}}
{{- if .root.Values.tls.enabled -}}
{{- $_ := set $admin "tls_cert_file" "/etc/headrace/tls/tls.crt" -}}
{{- $_ := set $admin "tls_key_file" "/etc/headrace/tls/tls.key" -}}
{{- end -}}
{{- $_ := set $config "admin" $admin -}}
{{- end -}}
{{- if .next -}}
{{- $_ := set $config "channel" $channel -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{- define "headrace.servedName" -}}
{{- default (.Values.model.name | base | trimSuffix ".gguf") .Values.model.servedName -}}
{{- end }}

{{/* Pods have names in certificates, and addresses otherwise. */}}
{{- define "headrace.discoveryConfig" -}}
{{- dict "type" "kubernetes" "address" (ternary "name" "ip" .Values.tls.enabled) "cluster_domain" .Values.clusterDomain | toYaml -}}
{{- end }}

{{- define "headrace.routerConfig" -}}
{{- $config := include "headrace.commonConfig" (dict "root" . "values" .Values.router "port" 8700 "service" "router" "next" "scheduler") | fromYaml -}}
{{- $own := dict "model" .Values.model.name "model_name" (include "headrace.servedName" .) -}}
{{- if eq .Values.discovery.type "kubernetes" -}}
{{- $_ := set $own "scheduler_selector" (include "headrace.labelSelector" (dict "root" . "component" "scheduler")) -}}
{{- $_ := set $config "discovery" (include "headrace.discoveryConfig" . | fromYaml) -}}
{{- else -}}
{{- $_ := set $own "scheduler" (include "headrace.schedulers" . | fromYaml).schedulers -}}
{{- end -}}
{{- $_ := set $config "router" $own -}}
{{- include "headrace.toml" (mustMergeOverwrite $config (mustDeepCopy (default (dict) .Values.router.config))) -}}
{{- end }}

{{/* Takes a dict of root and index. */}}
{{- define "headrace.schedulerConfig" -}}
{{- $config := include "headrace.commonConfig" (dict "root" .root "values" .root.Values.scheduler "port" 8701 "service" "scheduler" "next" "gpuworker") | fromYaml -}}
{{- if eq .root.Values.discovery.type "kubernetes" -}}
{{- $_ := set $config "scheduler" (dict "worker_selector" (include "headrace.labelSelector" (dict "root" .root "component" "gpuworker"))) -}}
{{- $_ := set $config "discovery" (include "headrace.discoveryConfig" .root | fromYaml) -}}
{{- else -}}
{{- $_ := set $config "scheduler" (dict "worker" (include "headrace.workers" . | fromYaml).workers) -}}
{{- end -}}
{{- include "headrace.toml" (mustMergeOverwrite $config (mustDeepCopy (default (dict) .root.Values.scheduler.config))) -}}
{{- end }}

{{/* Takes a dict of root and pool, a pool with all its values. */}}
{{- define "headrace.gpuworkerConfig" -}}
{{- $config := include "headrace.commonConfig" (dict "root" .root "values" .pool "port" 8702 "service" "gpuworker") | fromYaml -}}
{{- $own := dict "model" (default .root.Values.model.name .pool.model) "model_name" (include "headrace.servedName" .root) "role" .pool.role "dtype" .pool.dtype "device" (ternary "cuda" "cpu" (gt (int .pool.gpu.count) 0)) -}}
{{- $_ := set $config "gpuworker" $own -}}
{{- include "headrace.toml" (mustMergeOverwrite $config (mustDeepCopy (default (dict) .pool.config))) -}}
{{- end }}
